"""A recompute runs with the routes and the plan of the forward it repeats.

Near ties in a router may fall the other way when it runs again; row counts would then differ from what the backward's
saved tensors and the other ranks expect. So the layer calls under one checkpoint write what they decided on a tape that
belongs to that checkpoint call alone, and the recompute reads it from the start: no second gather, no second host copy.

    checkpoint(block, x, use_reentrant=False, context_fn=replay_contexts)
    checkpoint(replayed(block), x, use_reentrant=True)

On demand the tape also says whose output is read before the block ends (`readers.py`): a recompute may leave the others
out.

T tokens here, K experts a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from mindspeed_chunk.moe.readers import Readers

__all__ = ["replay_beside", "replay_contexts", "replayed"]

# What `torch.utils.checkpoint` takes as `context_fn`: makes a context for the forward, and one for its recomputes.
Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
Result = TypeVar("Result")


@dataclass
class _Tape:
    """What the layer calls under one checkpoint call decided, and whose output was read, by number; None: unknown."""

    entries: list[Any] = field(default_factory=list)
    read: frozenset[int] | None = None


@dataclass
class Recalled:
    """What a layer call decided in the forward, and whether this recompute of it must give an output."""

    entry: Any
    output_needed: bool


class _Context:
    """Makes a tape the current one, in the thread that runs the layers: that of a recompute may be another."""

    current: ContextVar[_Context | None] = ContextVar("tape", default=None)

    def __init__(self, tape: _Tape, *, replaying: bool, reentrant: bool = False) -> None:
        self.tape, self.replaying, self.reentrant = tape, replaying, reentrant
        self.position = 0
        self.readers: Readers | None = None
        self.entered = False
        self.outer: _Context | None = None

    def __enter__(self) -> None:
        # entered once a recompute: from the start again, also after one that ended early
        self.position = 0
        if not self.replaying:
            self.tape.entries.clear()
        self.entered, self.outer = True, _Context.current.get()
        _Context.current.set(self)

    def __exit__(self, *exception: object) -> None:
        readers, self.readers = self.readers, None
        if readers is not None:
            readers.__exit__(*exception)
            if exception[0] is None:
                self.tape.read = frozenset(readers.read)
        self.entered = False
        _Context.current.set(next(_around(), None))

    def write_down(self, entry: Any, out: torch.Tensor, *, follow: bool) -> None:
        if follow:
            if self.readers is None:
                self.readers = Readers()
                self.readers.__enter__()
            self.readers.follow(out, len(self.tape.entries))
        self.tape.entries.append(entry)


def _around() -> Iterator[_Context]:
    """The contexts around this point, from the inside out.

    torch 2.7 leaves that of a forward that has failed only when its frame is collected, perhaps inside of another one.
    """
    context = _Context.current.get()
    while context is not None:
        if context.entered:
            yield context
        context = context.outer


def replay_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The `context_fn` of a non-reentrant `torch.utils.checkpoint.checkpoint`: for its forward, for its recomputes."""
    tape = _Tape()
    return _Context(tape, replaying=False), _Context(tape, replaying=True)


class _Both:
    """Two contexts as one, the second inside of the first; entered as often as they can be."""

    def __init__(self, *contexts: AbstractContextManager) -> None:
        self._contexts = contexts
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


def replay_beside(context_fn: Contexts) -> Contexts:
    """`replay_contexts` for a checkpoint that has a `context_fn` already: both work.

    Ours stand inside: what they enter while the layers run is left first.
    """

    def contexts() -> tuple[_Both, _Both]:
        forward, recompute = (_Both(*both) for both in zip(context_fn(), replay_contexts(), strict=True))
        return forward, recompute

    return contexts


def replayed(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function as a reentrant `torch.utils.checkpoint.checkpoint`, which takes no `context_fn`, must get it.

    Belongs to one checkpoint call: its first call is the forward, all others are recomputes. Raises RuntimeError where
    another one is not.
    """
    tape = _Tape()
    forward = _Context(tape, replaying=False, reentrant=torch.is_grad_enabled())
    recompute, called = _Context(tape, replaying=True), False

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        nonlocal called
        if called and not _in_backward():
            raise RuntimeError(
                "what `replayed` has made belongs to one checkpoint call, and was called in another forward: write "
                "checkpoint(replayed(block), ...) where the checkpoint is called; see docs/api.md"
            )
        context, called = recompute if called else forward, True
        with context:
            return function(*args, **kwargs)

    return run


def _in_backward() -> bool:
    """Whether a backward runs in this thread: torch's own checkpoint asks for its number, too, which is -1 for none."""
    return torch._C._current_graph_task_id() != -1


def backward_follows() -> bool:
    """Whether the results of a forward may be differentiated: with gradients on, or in a reentrant checkpoint."""
    return torch.is_grad_enabled() or any(context.reentrant for context in _around())


def refuse_unreplayed() -> None:
    """Raise RuntimeError if this is a recompute that has no tape, in which routes may change without a word."""
    if torch.is_grad_enabled() and _in_backward():
        raise RuntimeError(
            "an MoE layer is recomputed by a checkpoint that does not replay the routes of its forward, so that "
            "gradients may be wrong: pass context_fn=mindspeed_chunk.moe.replay.replay_contexts to torch's checkpoint, "
            "or with use_reentrant=True give it replayed(function); see docs/api.md"
        )


def recall() -> Recalled | None:
    """What this layer call wrote down in the forward, if this is a recompute of it.

    A checkpoint inside of the recomputed block gets it for its own recompute.
    """
    inside = []
    for context in _around():
        if not context.replaying:
            inside.append(context)
            continue
        number, tape = context.position, context.tape
        if number == len(tape.entries):
            raise RuntimeError("the recompute of a checkpoint makes more MoE layer calls than its forward made")
        context.position += 1
        for checkpoint in inside:
            checkpoint.tape.entries.append(tape.entries[number])
        return Recalled(tape.entries[number], tape.read is None or number in tape.read)
    return None


def write_down(entry: Any, out: torch.Tensor, *, follow: bool) -> None:
    """Keep `entry` for the recomputes of every checkpoint around this layer call.

    Args:
        out: the layer's output.
        follow: see who reads it until the block ends.
    """
    around = [context for context in _around() if not context.replaying]
    for context in reversed(around):  # the watchers are a stack, which the outermost enters first
        context.write_down(entry, out, follow=follow)


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
