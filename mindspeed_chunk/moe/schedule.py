"""Schedules of a chunked MoE layer, as data: build, print, parse, validate, simulate. This module uses no tensors.

A schedule is a tuple of actions, run from left to right by one rank's compute queue. Per chunk c:

    Pc  permute: rows into the order in which they are sent
    Dc  dispatch: launch the all-to-all towards the experts
    Ec  experts: wait for Dc, then the expert FFN (in the backward: the gradient of its input)
    Cc  combine: launch the all-to-all back
    Wc  the experts' weight gradients (backward only; does not depend on communication, so it hides Cc)
    Uc  unpermute: wait for Cc, then rows back into token order, and their sum per token

The text form "P0 D0 P1 D1 E0 C0 ..." can be parsed. The executor runs the same actions, and profiler ranges have the
same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mindspeed_chunk.config import SCHEDULES

__all__ = ["Action", "Span", "Timeline", "build", "parse", "render", "simulate", "validate"]

KINDS = "PDECWU"
_ROUNDING = 1e-12  # relative error of a sum of times


class Action(NamedTuple):
    """One step on one chunk. Chunks are counted from 0; `kind` is one of `KINDS`."""

    kind: str
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}"


Schedule = tuple[Action, ...]


@functools.cache
def build(name: str, num_chunks: int, *, lookahead: int = 1, backward: bool = False, drop: str = "") -> Schedule:
    """The schedule `name` for `num_chunks` chunks.

    * "rolling": chunk c + lookahead is dispatched before the experts of chunk c run. With a lookahead of 1, nothing
      hides the first dispatch and the last combine, and at most three chunks own buffers. Each additional chunk ahead
      is one more that owns buffers. With 0, no chunk is dispatched ahead, and only combines are hidden.
    * "pair": two chunks overlap with each other, then the next two; nothing overlaps across pairs.

    Args:
        backward: with the weight gradients W, each after the launch of the C that it hides.
        drop: kinds left out, such as "CU" in a backward whose input needs no gradient.

    Raises:
        ValueError: for an unknown name or a number of chunks below 1.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks: {num_chunks}: a schedule has at least one chunk")
    if name not in SCHEDULES:
        raise ValueError(f"schedule: {name!r}: must be one of {', '.join(SCHEDULES)}")
    text = _BUILDERS[name](num_chunks, lookahead, backward)
    dropped = drop if backward else drop + "W"
    return tuple(action for action in map(_parse_action, text) if action.kind not in dropped)


def _rolling(num_chunks: int, lookahead: int, backward: bool) -> Iterable[str]:
    for c in range(-lookahead, num_chunks):
        if c + lookahead < num_chunks:
            yield from (f"P{c + lookahead}", f"D{c + lookahead}")
        if c < 0:
            continue
        yield f"E{c}"
        # the previous chunk's rows have arrived by now; in the backward, which also holds the operands of W, they are
        # freed before this chunk's combine needs memory
        before = [f"U{c - 1}"] if c > 0 else []
        yield from (*before, f"C{c}", f"W{c}") if backward else (f"C{c}", *before)
    yield f"U{num_chunks - 1}"


def _pair(num_chunks: int, lookahead: int, backward: bool) -> Iterable[str]:
    for first in range(0, num_chunks, 2):
        chunks = range(first, min(first + 2, num_chunks))
        yield from (f"P{c}" for c in chunks)
        yield from (f"D{c}" for c in chunks)
        for c in chunks:
            yield from (f"E{c}", f"C{c}")
        yield from (f"W{c}" for c in chunks)
        yield from (f"U{c}" for c in chunks)


# The actions of each of SCHEDULES, as text. W may also be in a forward: `build` removes it there.
_BUILDERS: dict[str, Callable[[int, int, bool], Iterable[str]]] = {"rolling": _rolling, "pair": _pair}


def after_first_dispatch(schedule: Schedule) -> int:
    """The number of actions up to the first launch: these open a call."""
    return next((i + 1 for i, action in enumerate(schedule) if action.kind == "D"), len(schedule))


def before_last_unpermutes(schedule: Schedule) -> int:
    """The number of actions before those that only wait for the last combines: the rest closes a call."""
    return max((i + 1 for i, action in enumerate(schedule) if action.kind != "U"), default=0)


def render(schedule: Schedule) -> str:
    """The text form, which `parse` reads."""
    return " ".join(map(str, schedule))


def parse(text: str) -> Schedule:
    """The schedule that `render` would print as `text`.

    Raises:
        ValueError: naming the word that is not an action.
    """
    return tuple(map(_parse_action, text.split()))


def _parse_action(word: str) -> Action:
    if word[:1] not in KINDS or not word[1:].isdecimal():
        raise ValueError(f"{word!r} is not an action: expected one of {KINDS} and a chunk number, such as D0")
    return Action(word[0], int(word[1:]))


def collectives(schedule: Schedule) -> Schedule:
    """The all-to-alls of a schedule in launch order. It must be the same on every rank of a group."""
    return tuple(action for action in schedule if action.kind in "DC")


def residency(schedule: Schedule) -> list[tuple[int, int]]:
    """After each action: chunks whose dispatch is launched and whose combine is not, and chunks that own buffers.

    A chunk owns buffers from its first action to its last.
    """
    last = {action.chunk: position for position, action in enumerate(schedule)}
    in_flight: set[int] = set()
    owners: set[int] = set()
    trace = []
    for position, (kind, chunk) in enumerate(schedule):
        owners.add(chunk)
        if kind == "D":
            in_flight.add(chunk)
        # without a combine (nothing to send back) the experts end the flight
        if kind == "C" or (kind == "E" and Action("C", chunk) not in schedule[position:]):
            in_flight.discard(chunk)
        if last[chunk] == position:
            owners.discard(chunk)
        trace.append((len(in_flight), len(owners)))
    return trace


def validate(schedule: Schedule, *, max_in_flight: int = 2, max_owners: int = 3) -> None:
    """Check that a schedule can run and stays within its memory.

    Raises:
        ValueError: if an action occurs twice, chunks are not numbered from 0, chunks differ in their actions, an
            action is before one that it needs (P, D, E, then C and W, C before U), the all-to-alls of a kind are not in
            chunk order, or more than `max_in_flight` chunks are between D and C or more than `max_owners` own buffers.
    """
    where = {action: position for position, action in enumerate(schedule)}
    if len(where) != len(schedule):
        twice = next(action for position, action in enumerate(schedule) if where[action] != position)
        raise ValueError(f"{twice} occurs twice")
    chunks = sorted({action.chunk for action in schedule})
    if not chunks or chunks != list(range(len(chunks))):
        raise ValueError(f"chunks must be numbered from 0 without gaps, got {chunks}")
    kinds = {action.kind for action in schedule}
    for action in (Action(kind, chunk) for chunk in chunks for kind in kinds):
        if action not in where:
            raise ValueError(f"{action} is missing")
    for before, after in ("PD", "DE", "EC", "EW", "CU"):
        if {before, after} <= kinds:
            for chunk in chunks:
                if where[Action(before, chunk)] > where[Action(after, chunk)]:
                    raise ValueError(f"{after}{chunk} is before {before}{chunk}")
    for kind in "DC":
        order = [action.chunk for action in schedule if action.kind == kind]
        if order != sorted(order):
            raise ValueError(f"the all-to-alls {kind} are not in chunk order: {order}")
    for position, (in_flight, owners) in enumerate(residency(schedule)):
        if in_flight > max_in_flight:
            raise ValueError(
                f"after {schedule[position]}, {in_flight} chunks are between D and C, expected at most {max_in_flight}"
            )
        if owners > max_owners:
            raise ValueError(f"after {schedule[position]}, {owners} chunks own buffers, expected at most {max_owners}")


class Span(NamedTuple):
    """When an action ran, in the unit of the costs. For D and C: when its rows were sent."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """The result of a simulation: spans in order of start, and the end of the last one."""

    spans: tuple[Span, ...]
    total: float

    def _sum(self, kinds: str) -> float:
        return sum(span.end - span.start for span in self.spans if span.action.kind in kinds)

    @property
    def communication(self) -> float:
        """Time of all all-to-alls, hidden or not."""
        return self._sum("DC")

    @property
    def exposed(self) -> float:
        """Time in which the compute queue waited for communication."""
        exposed = self.total - self._sum("PEWU")
        return exposed if exposed > _ROUNDING * self.total else 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the communication that ran during computation; 1 if there is no communication."""
        return 1 - self.exposed / self.communication if self.communication else 1.0


def simulate(
    schedule: Schedule, cost: Callable[[Action], float], issue: Callable[[Action], float] = lambda action: 0.0
) -> Timeline:
    """Run a schedule with costs, with one compute queue and one communication queue, both first in, first out.

    An all-to-all starts when its launch is reached and the communication queue is free; a launch itself costs nothing.
    E waits for its D and U for its C. The host issues one action after the other, ahead of the device. An action cannot
    start before the host issues it, nor end before that is done; if it waits for the host, this counts as its own time.

    Args:
        cost: of an action in any unit; for D and C it is the time to send their rows.
        issue: time that the host needs to issue it, in the same unit.
    """
    compute = wire = host = 0.0
    arrival: dict[Action, float] = {}
    spans = []
    for action in schedule:
        issued, host = host, host + issue(action)
        if action.kind in "DC":
            start = max(compute, wire, host)
            wire = arrival[action] = start + cost(action)
            spans.append(Span(action, start, wire))
        else:
            awaited = {"E": "D", "U": "C"}.get(action.kind)
            start = max(compute, arrival.get(Action(awaited, action.chunk), 0.0)) if awaited else compute
            compute = max(max(start, issued) + cost(action), host)
            spans.append(Span(action, start, compute))
    return Timeline(tuple(sorted(spans, key=lambda span: span.start)), max(compute, wire))
