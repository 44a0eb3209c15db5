"""A recompute uses the routes and the plan of the forward that it repeats.

When a router runs again, near ties may be decided differently. Row counts would then not match the saved tensors of the
backward, and the other ranks. So the layer calls under one checkpoint write their decisions on a tape that belongs to
that checkpoint call alone. The recompute reads the tape from the start: no second gather, no second host copy.

    checkpoint(block, x, use_reentrant=False, context_fn=replay_contexts)
    checkpoint(replayed(block), x, use_reentrant=True)

If requested, the tape also records whose output is read before the block ends (`readers.py`): a recompute may leave out
the others.

T tokens here, K experts per token.
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

# The type of `context_fn` of `torch.utils.checkpoint`: makes a context for the forward and one for its recomputes.
Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
Result = TypeVar("Result")


@dataclass
class _Tape:
    """The decisions of the layer calls under one checkpoint call, and whose outputs were read (None: unknown)."""

    entries: list[Any] = field(default_factory=list)
    read: frozenset[int] | None = None


@dataclass
class Recorded:
    """The decision of a layer call in the forward, and whether its recompute must give an output."""

    entry: Any
    output_needed: bool


class _Context:
    """Makes a tape the current one in the thread that runs the layers. A recompute may run in another thread."""

    current: ContextVar[_Context | None] = ContextVar("tape", default=None)

    def __init__(self, tape: _Tape, *, replaying: bool, reentrant: bool = False) -> None:
        self.tape, self.replaying, self.reentrant = tape, replaying, reentrant
        self.position = 0
        self.readers: Readers | None = None
        self.entered = False
        self.outer: _Context | None = None

    def __enter__(self) -> None:
        # entered once per recompute: starts again, also after one that ended early
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

    def record(self, entry: Any, out: torch.Tensor, *, follow: bool) -> None:
        if follow:
            if self.readers is None:
                self.readers = Readers()
                self.readers.__enter__()
            self.readers.follow(out, len(self.tape.entries))
        self.tape.entries.append(entry)


def _around() -> Iterator[_Context]:
    """The contexts around this point, from the inside out.

    torch 2.7 leaves the context of a failed forward only when its frame is collected, perhaps inside another one.
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
    """Two contexts as one, the second inside the first. It can be entered as often as they can."""

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
    """`replay_contexts` for a checkpoint that already has a `context_fn`: both are active.

    Ours are inside: contexts that they enter while the layers run are left first.
    """

    def contexts() -> tuple[_Both, _Both]:
        forward, recompute = (_Both(*both) for both in zip(context_fn(), replay_contexts(), strict=True))
        return forward, recompute

    return contexts


def replayed(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wraps a function for a reentrant `torch.utils.checkpoint.checkpoint`, which takes no `context_fn`.

    The result belongs to one checkpoint call: its first call is the forward, all others are recomputes. Raises
    RuntimeError if another call is not a recompute.
    """
    tape = _Tape()
    forward = _Context(tape, replaying=False, reentrant=torch.is_grad_enabled())
    recompute, called = _Context(tape, replaying=True), False

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        nonlocal called
        if called and not _in_backward():
            raise RuntimeError(
                "the result of `replayed` belongs to one checkpoint call, but was called in another forward: write "
                "checkpoint(replayed(block), ...) where the checkpoint is called; see docs/api.md"
            )
        context, called = recompute if called else forward, True
        with context:
            return function(*args, **kwargs)

    return run


def _in_backward() -> bool:
    """Whether a backward runs in this thread: its number is -1 if none does; torch's own checkpoint uses it, too."""
    return torch._C._current_graph_task_id() != -1


def backward_follows() -> bool:
    """Whether the results of a forward may be differentiated: with gradients on, or in a reentrant checkpoint."""
    return torch.is_grad_enabled() or any(context.reentrant for context in _around())


def refuse_unreplayed() -> None:
    """Raise RuntimeError if this is a recompute without a tape: its routes may change without an error."""
    if torch.is_grad_enabled() and _in_backward():
        raise RuntimeError(
            "an MoE layer is recomputed by a checkpoint that does not replay the routes of its forward, so "
            "gradients may be wrong: pass context_fn=mindspeed_chunk.moe.replay.replay_contexts to torch's checkpoint, "
            "or with use_reentrant=True give it replayed(function); see docs/api.md"
        )


def read_tape() -> Recorded | None:
    """The decision of this layer call in the forward, if this is a recompute of it.

    A checkpoint inside the recomputed block gets it for its own recompute.
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
        return Recorded(tape.entries[number], tape.read is None or number in tape.read)
    return None


def record(entry: Any, out: torch.Tensor, *, follow: bool) -> None:
    """Keep `entry` for the recomputes of every checkpoint around this layer call.

    Args:
        out: the layer's output.
        follow: record whether it is read until the block ends.
    """
    around = [context for context in _around() if not context.replaying]
    for context in reversed(around):  # the dispatch modes are a stack; the outermost context enters first
        context.record(entry, out, follow=follow)


def reroute(route_TK: torch.Tensor, kept_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of `kept_TK`, in the positions in which `route_TK` has them.

    Router weights are in the order of `route_TK`. So an expert that both have keeps its weight. An expert that only the
    forward chose gets the position, and so the weight, of one that only the recompute chose.

    Returns:
        The routes `[T, K]`, and how many (token, expert) pairs of the recompute were not the forward's, int64 `[1]`.
    """
    same_TKK = route_TK[:, :, None] == kept_TK[:, None, :]
    new_TK, lost_TK = ~same_TKK.any(2), ~same_TKK.any(1)
    changed = new_TK.sum().view(1)
    if route_TK.shape[1] == 1:
        return kept_TK, changed
    # Stable sorts put the common experts first, so the others are in the same positions after them. In fp32, which is
    # exact for expert ids: an NPU sorts integers on its AI CPU, and scatters int64 or gathers bool there.
    new_last_TK, at_TK = _sorted(new_TK)
    from_TK = _sorted(lost_TK).indices
    moved_TK = torch.where(new_last_TK.to(torch.bool), kept_TK.gather(1, from_TK), route_TK.gather(1, at_TK))
    moved_TK = moved_TK.gather(1, _sorted(at_TK).indices)  # back to the positions of the router weights
    # a token that was sent to one expert twice has no such positions
    fits_T = (_sorted(moved_TK).values == _sorted(kept_TK).values).all(1, keepdim=True)
    return torch.where(fits_T, moved_TK, kept_TK), changed


def _sorted(value_TK: torch.Tensor) -> torch.return_types.sort:
    return value_TK.to(torch.float32).sort(dim=1, stable=True)
