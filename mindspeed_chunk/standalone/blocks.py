"""The wrappers of a block of the model: recompute, offload, micro-chunks."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from mindspeed_chunk.mbs.block import ChunkMBS, Forward, SideOutputs, wrap_blocks
from mindspeed_chunk.mbs.offload import ActivationOffload
from mindspeed_chunk.moe.replay import replay_contexts
from mindspeed_chunk.standalone.config import Config
from mindspeed_chunk.standalone.model import Modules


def wrap_model(config: Config, modules: Modules, side_outputs: list[SideOutputs]) -> ActivationOffload:
    """Wrap the blocks in `modules` as the Config says. Returns the ActivationOffload, for its host buffers.

    side_outputs: see ChunkMBS.
    """
    offload = ActivationOffload()
    chunked: Any = None
    if config.chunk_mbs is not None:
        sizes = (config.training.micro_batch_size,)
        chunked = ChunkMBS(config.chunk_mbs, batch_sizes=sizes, group=dist.group.WORLD, side_outputs=side_outputs).wrap
    wrap_blocks(
        modules.recompute,
        modules.offload,
        modules.chunk,
        recomputed=_recomputed,
        offloaded=offload.wrap,
        chunked=chunked,
    )
    return offload


def _recomputed(name: str, module: Module) -> Forward:
    return partial(checkpoint, module.forward, use_reentrant=False, context_fn=replay_contexts)
