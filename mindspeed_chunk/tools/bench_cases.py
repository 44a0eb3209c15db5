"""The cases of the layer benchmark, by their names.

rolling:4               a schedule and a number of chunks; activations are kept
rolling:4:rows          the same with another chunk_moe_keep: rows or input
rolling:4:per_rank      with another chunk_moe_dispatch; without the word it is per_expert
rolling:4:fill          with --shared-expert, that expert runs while the first and the last rows travel, not before
rolling:4:ahead2        two chunks are dispatched ahead of the experts; ahead0: none
rolling:1:whole         rows to another rank go out in one message, not in pieces of at most 1 MB
alltoall                the plain dispatcher of this package
host:alltoall           MindSpeed-MM's `ep_forward`; host:allgather is its other dispatcher
rolling:4:rows:per_rank words can be combined, in any order
all                     every schedule, 1, 2, 4 and 8 chunks, every memory mode
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch

from mindspeed_chunk import dist as wire
from mindspeed_chunk.config import DISPATCHES, KEEPS, SCHEDULES, ChunkMoEConfig, ConfigError
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.moe.costs.rows import PER_EXPERT
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.tools import bench_host

WHOLE = "rolling:1:whole"
# what other cases are compared with, where it takes part
BASELINES = (WHOLE, "rolling:1", "alltoall", *bench_host.CASES)
# what the words after the number of chunks set; a word with the settings of another one contradicts it
_WORDS: dict[str, dict[str, Any]] = {
    **{keep: {"chunk_moe_keep": keep} for keep in KEEPS},
    **{dispatch: {"chunk_moe_dispatch": dispatch} for dispatch in DISPATCHES},
    "fill": {},
    "whole": {},
    "ahead0": {"chunk_moe_lookahead": 0},
    "ahead2": {"chunk_moe_lookahead": 2},
}
_MOST_CHUNKS = 1024
_ALL_CHUNKS = (1, 2, 4, 8)
_SHORT = ("rolling:2", "rolling:4", "rolling:8", "pair:2", "pair:4", "pair:8", "rolling:4:rows")


class BenchCase(NamedTuple):
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
    """The parts of a name of the form `schedule:N[:word ...]`."""

    schedule: str
    chunks: int
    words: tuple[str, ...] = ()

    @property
    def keep(self) -> str:
        return next((word for word in self.words if word in KEEPS), KEEPS[0])

    @property
    def dispatch(self) -> str:
        return next((word for word in self.words if word in DISPATCHES), PER_EXPERT)

    @property
    def mode(self) -> str:
        """What is kept, and the other words, in one order."""
        return ":".join((self.keep, *sorted(word for word in self.words if word not in KEEPS)))


def parse(name: str) -> Parsed | None:
    """The parts of a chunked case's name; None for a baseline that has none.

    Raises:
        ConfigError: saying what a name may be.
    """
    if name in ("alltoall", WHOLE, *bench_host.CASES):
        return None
    schedule, chunks, *words = name.split(":") if ":" in name else ("", "")
    number = int(chunks) if chunks.isdecimal() and len(chunks) < 10 else 0
    if schedule not in SCHEDULES or not 1 <= number <= _MOST_CHUNKS:
        raise ConfigError(
            f"case {name!r}: must be {' or '.join(SCHEDULES)} with a number of chunks up to {_MOST_CHUNKS} and maybe "
            f"words after it, such as rolling:4 or rolling:4:rows:per_rank, or one of {WHOLE}, alltoall, "
            f"{', '.join(bench_host.CASES)}, all"
        )
    parsed = Parsed(schedule, number, tuple(words))
    try:
        _config(parsed)
    except ConfigError as error:
        raise ConfigError(f"case {name!r}: {error}") from None
    return parsed


def names_of(text: str | None) -> list[str]:
    """The cases of a comma-separated list, each once and known to be possible; without one, a short selection.

    Raises:
        ConfigError: for a name that is no case, or a host that is not there.
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


def build(name: str) -> BenchCase:
    parsed = Parsed("rolling", 1, ("whole",)) if name == WHOLE else parse(name)
    if parsed is None:
        return BenchCase(name, AllToAllDispatcher() if name == "alltoall" else bench_host.load(name), nullcontext())
    # a patch can be entered again and again
    whole = mock.patch.object(wire, "GLOO_PIECE_BYTES", math.inf)
    around = whole if "whole" in parsed.words else nullcontext()
    return BenchCase(name, ChunkMoEDispatcher(_config(parsed)), around, fills="fill" in parsed.words)


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
    settings: dict[str, Any] = {"chunk_moe_dispatch": PER_EXPERT}
    given: dict[str, str] = {}
    for word in parsed.words:
        if word not in _WORDS:
            raise ConfigError(f"{word!r}: must be one of {', '.join(_WORDS)}")
        for setting, value in _WORDS[word].items():
            if setting in given:
                raise ConfigError(f"{word!r}: contradicts {given[setting]!r}; remove one of the two")
            given[setting], settings[setting] = word, value
    return ChunkMoEConfig(moe_num_chunks=parsed.chunks, chunk_moe_schedule=parsed.schedule, **settings)
