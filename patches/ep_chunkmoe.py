"""The module of the published dispatcher, for hosts that lack it: its two functions, implemented by ours.

Its finder comes last, so a host that has the module keeps its own.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.patches import ep_dispatcher, settings
from mindspeed_chunk.patches.record import Patch, Undo

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher

_PACKAGE = "mindspeed_mm.fsdp.distributed.expert_parallel"
_NAME = f"{_PACKAGE}.ep_chunkmoe"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == _NAME else None

    def exec_module(self, module: Any) -> None:
        from mindspeed_chunk.device import untraced

        module.__doc__ = "Chunk MoE of mindspeed_chunk, under the published names."
        module.ep_chunkmoe_forward = untraced(ep_chunkmoe_forward)
        module.batched_pre_dispatch_metadata = batched_pre_dispatch_metadata


def ep_chunkmoe_forward(*args: Any, ep_plan: object = None, **kwargs: Any) -> torch.Tensor:
    """The host's `ep_forward` arguments and the plan with the `moe_*` and `chunk_moe_*` keys; returns `[T, H]`.

    Raises:
        ValueError: without a plan.
    """
    import inspect

    if ep_plan is None:
        raise ValueError("ep_plan: None: must be given: it has the number of chunks")
    dispatcher = _dispatcher(ChunkMoEConfig.from_mapping(settings.section_mapping(ep_plan)))
    names = [name for name in inspect.signature(dispatcher.__call__).parameters if name != "self"]
    named = {**dict(zip(names, args)), **kwargs}
    return dispatcher(**ep_dispatcher.translate(sys.modules[ep_dispatcher.PATCH.module], named))


@functools.cache
def _dispatcher(config: ChunkMoEConfig) -> ChunkMoEDispatcher:
    from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher

    return ChunkMoEDispatcher(config, weight_layout="LHF")


def batched_pre_dispatch_metadata(
    chunk_se_list: Sequence[torch.Tensor], num_global_experts: int, ep_group: dist.ProcessGroup | None = None
) -> tuple[list[list[int]], list[list[int]], list[torch.Tensor], list[torch.Tensor]]:
    """Splits and counts of every chunk from one gather and one host copy.

    Args:
        chunk_se_list: each chunk's expert ids, `[tokens, K]` or flat.

    Returns:
        Four lists, one entry per chunk: rows to each rank, rows from each rank (lists of integers), counts by source
        rank and local expert (int64 `[ep, L]`), their sums over the sources (int64 `[L]`).

    Raises:
        ValueError: for a number of experts that the group's size does not divide.
    """
    import torch

    from mindspeed_chunk.device import HostCopy
    from mindspeed_chunk.dist import all_gather, group_rank, group_size

    ep, rank = group_size(ep_group), group_rank(ep_group)
    if num_global_experts % ep:
        raise ValueError(f"num_global_experts: {num_global_experts}: must be divisible by the group's size, {ep}")
    local = num_global_experts // ep
    counts_NE = torch.stack([torch.bincount(ids.reshape(-1), minlength=num_global_experts) for ids in chunk_se_list])
    gathered, work = all_gather(counts_NE.reshape(-1), ep_group, "plan")
    work.wait()
    counts_NRE = gathered.view(ep, len(chunk_se_list), num_global_experts).transpose(0, 1)
    host_NRE = HostCopy(counts_NRE, "plan").wait()
    here = slice(rank * local, (rank + 1) * local)
    sent = host_NRE[:, rank].reshape(-1, ep, local).sum(2).tolist()
    received = host_NRE[:, :, here].sum(2).tolist()
    counts_NRL = counts_NRE[:, :, here].contiguous()
    return sent, received, list(counts_NRL), list(counts_NRL.sum(1))


def apply(module: ModuleType) -> Undo:
    finder = _Finder()
    sys.meta_path.append(finder)

    def undo() -> None:
        sys.meta_path.remove(finder)
        loaded = sys.modules.get(_NAME)
        if loaded is not None and loaded.__spec__ is not None and loaded.__spec__.loader is finder:
            del sys.modules[_NAME]

    return undo


PATCH = Patch(
    name="published module",
    module="mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher",
    target="ep_chunkmoe",
    hosts="26.0.0, 26.1.0, master of 2026-08",
    expects="nothing; if the host has a module of this name, that one is used",
    why="code that imports the published dispatcher finds ours",
    until="the oldest supported host has the module",
    apply=apply,
)
