"""How many chunks: the fastest N whose layer fits a cap, and the smallest of those that are as good as it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mindspeed_chunk.hardware import Device, GroupShape
from mindspeed_chunk.moe.costs.memory import ChunkRows, ExpertMemory, LayerShape, balanced_rows, expert_memory
from mindspeed_chunk.moe.costs.timing import ChunkTimes, chunk_times

CANDIDATES = (1, 2, 4, 8)
_SAME = 1.01  # times the fastest


class ChunkChoice(NamedTuple):
    """The chosen N, and memory and times of each candidate."""

    num_chunks: int
    memory: dict[int, ExpertMemory]
    times: dict[int, ChunkTimes]


def best_num_chunks(
    shape: LayerShape,
    device: Device,
    span: GroupShape | None = None,
    *,
    candidates: Sequence[int] = CANDIDATES,
    schedule: str = "rolling",
    keep: str = "activations",
    lookahead: int = 1,
    dtype: str = "bf16",
    max_bytes: float = float("inf"),
    rows_of: Callable[[int], Sequence[ChunkRows]] | None = None,
) -> ChunkChoice:
    """The number of chunks for one layer shape. A pure function of its arguments: equal ones give equal choices.

    Args:
        span: of the expert-parallel group; without it, all its ranks are on one node.
        schedule, keep, lookahead: `chunk_moe_schedule`, `chunk_moe_keep`, `chunk_moe_lookahead`.
        dtype: of the experts' computation; a key of `device.flops`.
        max_bytes: of a layer call at its peak. If no candidate fits, the one with the lowest peak is chosen.
        rows_of: from N to the rows of each chunk, for example from gathered counts; balanced without it.
    """
    rows = {n: rows_of(n) if rows_of else balanced_rows(shape, n) for n in candidates}
    how: dict[str, Any] = {"schedule": schedule, "keep": keep, "lookahead": lookahead}
    memory = {n: expert_memory(shape, rows=rows[n], **how) for n in candidates}
    times = {n: chunk_times(shape, device, span, rows=rows[n], dtype=dtype, **how) for n in candidates}
    fitting = [n for n in candidates if memory[n].peak <= max_bytes]
    if not fitting:
        return ChunkChoice(min(candidates, key=lambda n: memory[n].peak), memory, times)
    fastest = min(times[n].total for n in fitting)
    return ChunkChoice(min(n for n in fitting if times[n].total <= _SAME * fastest), memory, times)
