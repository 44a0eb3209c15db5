"""A recompute runs with the routes and the plan of the forward it repeats, and without what nobody reads of it.

Near ties in a router may fall the other way when it runs again; row counts would then differ from what the backward's
saved tensors and the other ranks expect. So the layer calls under one checkpoint write what they decided on a tape that
belongs to that checkpoint call alone, and the recompute reads it from the start: no second gather, no second host copy.

    checkpoint(block, x, use_reentrant=False, context_fn=replaying(block))

What comes after a layer in its block often only adds to its output, and saves nothing of it for the backward. Whether
that is so is watched once, in the block's first forward; then recomputes leave the output out (`readers.py`).

T tokens here, K experts a token.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_chunk.moe.readers import Readers


@dataclass
class _Verdict:
    """`read`: the numbers of the layer calls in a function whose output somebody reads; None: not known yet."""

    read: frozenset[int] | None = None


@dataclass
class _Tape:
    """What the layer calls under one checkpoint call decided."""

    verdict: _Verdict
    entries: list[Any] = field(default_factory=list)


@dataclass
class Recalled:
    """What a layer call decided in the forward, and whether this recompute of it must give an output."""

    entry: Any
    output_read: bool


class _Context:
    """Makes a tape the current one, in the thread that runs the layers: that of a recompute may be another."""

    current: ContextVar[_Context | None] = ContextVar("tape", default=None)

    def __init__(self, tape: _Tape, *, replaying: bool, readers: Readers | None = None) -> None:
        self.tape, self.replaying, self.readers = tape, replaying, readers
        self.position = 0
        self.outer: _Context | None = None

    def __enter__(self) -> None:
        # entered once a recompute: from the start again, also after one that ended early
        self.position = 0
        if not self.replaying:
            self.tape.entries.clear()
        self.outer = _Context.current.get()
        _Context.current.set(self)
        if self.readers is not None:
            self.readers.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self.readers is not None:
            self.readers.__exit__(*exception)
            if exception[0] is None:
                self.tape.verdict.read = frozenset(self.readers.read)
        _Context.current.set(self.outer)
        self.outer = None


_verdicts: weakref.WeakKeyDictionary[Callable, _Verdict] = weakref.WeakKeyDictionary()


def replaying(function: Callable) -> Callable[[], tuple[_Context, _Context]]:
    """The `context_fn` of a non-reentrant checkpoint of `function`, which stays the same object from call to call."""

    def contexts() -> tuple[_Context, _Context]:
        """For the forward, for its recomputes."""
        verdict = _verdicts.setdefault(function, _Verdict())
        watch = verdict.read is None and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        tape, readers = _Tape(verdict), Readers() if watch else None
        return _Context(tape, replaying=False, readers=readers), _Context(tape, replaying=True)

    return contexts


def recall() -> Recalled | None:
    """What this layer call wrote down in the forward, if this is a recompute of it."""
    context = _Context.current.get()
    while context is not None:
        if context.replaying:
            number, entries, read = context.position, context.tape.entries, context.tape.verdict.read
            if number == len(entries):
                raise RuntimeError("the recompute of a checkpoint makes more MoE layer calls than its forward made")
            context.position += 1
            return Recalled(entries[number], read is None or number in read)
        context = context.outer
    return None


def write_down(entry: Any, out: torch.Tensor) -> None:
    """Keep `entry` for the recomputes of every checkpoint around this layer call, and see who reads its output."""
    context = _Context.current.get()
    while context is not None:
        if not context.replaying:
            if context.readers is not None:
                context.readers.follow(out, len(context.tape.entries))
            context.tape.entries.append(entry)
        context = context.outer


def reroute(route_TK: torch.Tensor, kept_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of `kept_TK` in the places that `route_TK` has them in.

    Router weights stand in the order of `route_TK`, so an expert that both have keeps its own weight there; one that
    only the forward chose takes the place, and with it the weight, of one that only the recompute chose.

    Returns:
        The routes `[T, K]`, and how many (token, expert) pairs of the recompute were not the forward's, int64 `[1]`.
    """
    same_TKK = route_TK[:, :, None] == kept_TK[:, None, :]
    new_TK, lost_TK = ~same_TKK.any(2), ~same_TKK.any(1)
    # stable sorts put what both have first, so the rests stand behind each other in the same places
    at_TK, from_TK = (mask_TK.to(torch.uint8).argsort(dim=1, stable=True) for mask_TK in (new_TK, lost_TK))
    moved_TK = torch.where(new_TK.gather(1, at_TK), kept_TK.gather(1, from_TK), route_TK.gather(1, at_TK))
    moved_TK = torch.empty_like(route_TK).scatter_(1, at_TK, moved_TK)
    # a token that was sent to one expert twice has no such places
    fits_T = (moved_TK.sort(1).values == kept_TK.sort(1).values).all(1, keepdim=True)
    return torch.where(fits_T, moved_TK, kept_TK), new_TK.sum().view(1)
