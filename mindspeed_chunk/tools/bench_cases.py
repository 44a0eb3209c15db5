"""The cases of the layer benchmark, by their names.

rolling:4               a schedule and a number of chunks; activations are kept
rolling:4:rows          the same with another chunk_moe_keep: rows or input
rolling:4:fill          with --shared-expert, that expert runs while the first and the last rows travel, not before
rolling:4:ahead2        two chunks are dispatched ahead of the experts; ahead0: none
rolling:2:pieces        all-to-alls of over 2 MB to a rank are sent as several; rolling:1:pieces is a baseline
alltoall                the plain dispatcher of this package
host:alltoall           MindSpeed-MM's `ep_forward`; host:allgather is its other dispatcher
all                     every schedule, 1, 2, 4 and 8 chunks, every memory mode
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig, ConfigError
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.tools import bench_host

PIECES = "rolling:1:pieces"
PIECE_BYTES = 2 * 2**20
# what other cases are compared with, where it takes part
BASELINES = ("rolling:1", PIECES, "alltoall", *bench_host.CASES)
# what a case's name may ask for beside a value of chunk_moe_keep; not part of "all"
_VARIANTS: dict[str, dict[str, object]] = {
    "fill": {},
    "pieces": {},
    "ahead0": {"chunk_moe_lookahead": 0},
    "ahead2": {"chunk_moe_lookahead": 2},
}
_ALL_CHUNKS = (1, 2, 4, 8)
_SHORT = ("rolling:2", "rolling:4", "rolling:8", "pair:2", "pair:4", "pair:8", "rolling:4:rows")


class CaseError(ValueError):
    """A case that does not exist, or cannot run here; the message is one line."""


class Case(NamedTuple):
    """A way to run the layer.

    Attributes:
        dispatch: takes the arguments of MindSpeed-MM's `ep_forward`.
        around: what must be active during forward and backward.
        fills: a shared expert is handed to the layer call.
    """

    name: str
    dispatch: Callable[..., torch.Tensor]
    around: AbstractContextManager
    fills: bool = False


class Parsed(NamedTuple):
    """A name of the form `schedule:N[:mode]`, taken apart."""

    schedule: str
    chunks: int
    mode: str


def _mode_settings(mode: str) -> dict[str, object]:
    known = {keep: {"chunk_moe_keep": keep} for keep in KEEPS} | _VARIANTS
    if mode not in known:
        raise CaseError(f"mode {mode!r}: must be one of {', '.join(known)}")
    return known[mode]


def parse(name: str) -> Parsed | None:
    """The parts of a chunked case's name; None for a baseline that has none.

    Raises:
        CaseError: saying what a name may be.
    """
    if name in ("alltoall", PIECES, *bench_host.CASES):
        return None
    schedule, chunks, mode = [*name.split(":"), KEEPS[0]][:3] if name.count(":") in (1, 2) else ("", "", "")
    if schedule not in SCHEDULES or not chunks.isdecimal() or int(chunks) < 1:
        raise CaseError(
            f"case {name!r}: must be {' or '.join(SCHEDULES)} with a number of chunks and maybe a value of "
            f"chunk_moe_keep, such as rolling:4 or rolling:4:rows, or one of {PIECES}, alltoall, "
            f"{', '.join(bench_host.CASES)}, all"
        )
    parsed = Parsed(schedule, int(chunks), mode)
    try:
        _config(parsed)
    except ConfigError as error:
        raise CaseError(f"case {name!r}: {error}") from None
    return parsed


def names_of(text: str | None) -> list[str]:
    """The cases of a comma-separated list, each once and known to be possible; without one, a short selection.

    Raises:
        CaseError: for a name that is no case, or a host that is not there.
    """
    words = text.split(",") if text else [*_baselines_here(), *_SHORT]
    words = [case for word in words for case in ([*_baselines_here(), *_every()] if word == "all" else [word])]
    names = list(dict.fromkeys(words))
    for name in names:
        parse(name)
    if uses_host(names):
        bench_host.check()
    return names


def uses_host(names: list[str]) -> bool:
    return any(name in bench_host.CASES for name in names)


def build(name: str) -> Case:
    parsed = parse(name)
    if parsed is not None:
        around = InPieces(PIECE_BYTES) if parsed.mode == "pieces" else nullcontext()
        return Case(name, _chunked(parsed), around, fills=parsed.mode == "fill")
    if name == PIECES:
        return Case(name, _chunked(Parsed("rolling", 1, KEEPS[0])), InPieces(PIECE_BYTES))
    if name == "alltoall":
        return Case(name, AllToAllDispatcher(), nullcontext())
    return Case(name, bench_host.load(name), nullcontext())


def _baselines_here() -> list[str]:
    return [name for name in BASELINES if name not in bench_host.CASES or os.environ.get(bench_host.HOME)]


def _every() -> list[str]:
    return [
        f"{schedule}:{chunks}" + ("" if mode == KEEPS[0] else f":{mode}")
        for mode in KEEPS
        for schedule in SCHEDULES
        for chunks in _ALL_CHUNKS
        if chunks > 1 or schedule == SCHEDULES[0]  # with one chunk all schedules are the same
    ]


def _config(parsed: Parsed) -> ChunkMoEConfig:
    settings = {"moe_num_chunks": parsed.chunks, "chunk_moe_schedule": parsed.schedule, **_mode_settings(parsed.mode)}
    return ChunkMoEConfig(**settings)


def _chunked(parsed: Parsed) -> ChunkMoEDispatcher:
    return ChunkMoEDispatcher(_config(parsed))


class InPieces:
    """While active, every all-to-all of rows to other ranks is sent as several of at most `limit` bytes.

    One large message takes longer over gloo than the same bytes in a few smaller ones, which is no merit of chunks: a
    baseline that does not suffer from it tells the two apart. No row is copied for it: a piece is a range of the rows
    for one other rank, in the buffers of the whole exchange. How many pieces there are must be the same on every rank;
    that is agreed on when an exchange comes for the first time, and remembered by its position among those of a layer
    call with the same width of rows, so that this costs no collective later on.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._agreed: dict[tuple[int, int], list[int]] = {}
        self._seen: Counter[int] = Counter()

    def __enter__(self) -> None:
        self._seen.clear()
        self._original = dist.all_to_all_single
        dist.all_to_all_single = self._send

    def __exit__(self, *_) -> None:
        dist.all_to_all_single = self._original

    def _send(self, output, input, output_split_sizes, input_split_sizes, group=None, async_op=False):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        arrives, leaves = output.split(output_split_sizes), input.split(input_split_sizes)
        works = []
        for distance, pieces in enumerate(self._pieces(arrives, leaves, group), start=1):
            to, source = (rank + distance) % size, (rank - distance) % size
            for here, there in zip(_cut(arrives[source], pieces), _cut(leaves[to], pieces), strict=True):
                received, sent = [0] * size, [0] * size
                received[source], sent[to] = here.shape[0], there.shape[0]
                works.append(self._original(here, there, received, sent, group=group, async_op=True))
        arrives[rank].copy_(leaves[rank])
        work = _All(works)
        if async_op:
            return work
        work.wait()

    def _pieces(self, arrives, leaves, group) -> list[int]:
        """For each distance between ranks above 0, the number of pieces."""
        width = leaves[0].shape[1] * leaves[0].element_size()
        key = (width, self._seen[width])
        self._seen[width] += 1
        if key not in self._agreed:
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            needed = []
            for distance in range(1, size):
                most = max(arrives[(rank - distance) % size].nbytes, leaves[(rank + distance) % size].nbytes)
                needed.append(max(1, -(-most // self._limit)))
            agreed = torch.tensor(needed, dtype=torch.int64)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
            self._agreed[key] = agreed.tolist()
        return self._agreed[key]


def _cut(rows: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """`pieces` ranges of the rows, equal up to one row."""
    return list(rows.tensor_split(pieces))


class _All:
    """A work that is done when all of several are."""

    def __init__(self, works: list) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
