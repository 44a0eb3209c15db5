"""The number of rows of each rank, when `dispatcher: allgather` runs in micro-chunks.

The host records the numbers in the model's first layer and uses them for all layers, forward and backward. They would
be wrong after the last micro-chunk of that layer, and in a layer after the chunked ones.
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
    """Check the functions and remember the module; change nothing yet."""
    for name in _FUNCTIONS:
        function = getattr(module, name)
        _, *others = inspect.signature(function).parameters
        if others[:1] != ["ep_group"] or not hasattr(module, _COUNTS):
            raise Drifted(f"{name}{signature_of(function)}")
    for seam in _SEAMS.values():
        seam.bind(module)
    return _undo


def activate() -> None:
    """From now on the recorded numbers are scaled by the number of rows in the call."""
    for name, of_this_rank in _FUNCTIONS.items():
        seam = _SEAMS[name]
        if not seam.replaced:
            seam.replace(functools.partial(_scaled, seam.owner, of_this_rank))


def _scaled(module: ModuleType, of_this_rank: bool, original: Callable) -> Callable:
    import torch.distributed as dist

    @functools.wraps(original)
    def move(tokens: Any, ep_group: Any, *args: Any, **kwargs: Any) -> Any:
        counts = getattr(module, _COUNTS)
        whole = (counts[dist.get_rank(ep_group)] if of_this_rank else sum(counts)) if counts else 0
        if not whole:
            return original(tokens, ep_group, *args, **kwargs)
        # every rank has the same number of samples, so all numbers of rows scale by the same factor
        setattr(module, _COUNTS, [count * len(tokens) // whole for count in counts])
        try:
            return original(tokens, ep_group, *args, **kwargs)
        finally:
            setattr(module, _COUNTS, counts)

    return move


def _undo() -> None:
    for seam in _SEAMS.values():
        seam.forget()


PATCH = Patch(
    name="row counts",
    module="mindspeed_mm.fsdp.distributed.expert_parallel.comm",
    target=", ".join(_FUNCTIONS),
    hosts="26.1.0, master of 2026-08",
    expects=f"{_COUNTS}; {', '.join(f'{name}(tokens, ep_group, ...)' for name in _FUNCTIONS)}",
    why="micro-chunks have fewer rows than the host recorded in its first layer",
    until="the host counts rows in each exchange",
    apply=check,
    enabled_by="features.enable_chunk_mbs: true with dispatcher: allgather",
)
