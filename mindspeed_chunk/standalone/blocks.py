"""The wrappers of a block of the model: recompute, offload, micro-chunks."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from mindspeed_chunk.mbs.block import ChunkMBS, wrap_blocks
from mindspeed_chunk.mbs.offload import ActivationOffload
from mindspeed_chunk.moe.replay import replay_contexts


def wrap_model(config, modules, side_outputs):
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


def _recomputed(name, module):
    return partial(checkpoint, module.forward, use_reentrant=False, context_fn=replay_contexts)
