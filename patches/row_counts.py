"""The rows that each rank holds, where `dispatcher: allgather` runs in micro-chunks.

The host notes them in the model's first layer, and takes them for all layers, forward and backward: the last
micro-chunk of that layer, or a layer after the chunked ones, would then tell the wrong number.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspeed_chunk.patches.record import Drifted, Patch, Seam, Undo, signature_of

_COUNTS = "EP_RANK_SEQ_LENS"
# what is moved: the rows of this rank, or those of all ranks
_FUNCTIONS = {"_gather_along_first_dim": True, "_reduce_scatter_along_first_dim": False}
_SEAMS = {name: Seam(name) for name in _FUNCTIONS}


def check(module: ModuleType) -> Undo:
    """Look at the functions and remember the module; nothing is changed yet."""
    for name in _FUNCTIONS:
        function = getattr(module, name)
        _, *others = inspect.signature(function).parameters
        if others[:1] != ["ep_group"] or not hasattr(module, _COUNTS):
            raise Drifted(f"{name}{signature_of(function)}")
    for seam in _SEAMS.values():
        seam.found(module)
    return _take_back


def use() -> None:
    """From now on a call's own number of rows says which part of the noted ones there are."""
    for name, of_this_rank in _FUNCTIONS.items():
        seam = _SEAMS[name]
        if not seam.replaced:
            seam.replace(functools.partial(_scaled, seam.owner, of_this_rank))


def _scaled(module: ModuleType, of_this_rank: bool, original: Callable) -> Callable:
    import torch.distributed as dist

    @functools.wraps(original)
    def move(tokens: Any, ep_group: Any, *args: Any, **kwargs: Any) -> Any:
        noted = getattr(module, _COUNTS)
        whole = (noted[dist.get_rank(ep_group)] if of_this_rank else sum(noted)) if noted else 0
        if not whole:
            return original(tokens, ep_group, *args, **kwargs)
        # every rank has as many samples as the others, so its rows grow and shrink with them
        setattr(module, _COUNTS, [count * len(tokens) // whole for count in noted])
        try:
            return original(tokens, ep_group, *args, **kwargs)
        finally:
            setattr(module, _COUNTS, noted)

    return move


def _take_back() -> None:
    for seam in _SEAMS.values():
        seam.forget()


PATCH = Patch(
    name="row counts",
    module="mindspeed_mm.fsdp.distributed.expert_parallel.comm",
    target=", ".join(_FUNCTIONS),
    hosts="26.1.0, master of 2026-08",
    expects=f"{_COUNTS}; {', '.join(f'{name}(tokens, ep_group, ...)' for name in _FUNCTIONS)}",
    why="micro-chunks have fewer rows than the host has noted in its first layer",
    until="the host counts rows where it moves them",
    apply=check,
    asked_by="features.enable_chunk_mbs: true with dispatcher: allgather",
)
