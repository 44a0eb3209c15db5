"""What one layer call did, on one rank: recorded, laid out in lanes, summed up, and simulated.

The executor tells when each of its actions ends. All-to-alls are watched below it: when each was launched, when its
last row had arrived, and between when and when somebody waited for it. On a CPU an action starts where the one before
it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from mindspeed_chunk.moe.schedule import KINDS, Action, Timeline, simulate
from mindspeed_chunk.observe import Event, observe
from mindspeed_chunk.tools.measure import sent_to_others

COMPUTE, WIRE = "compute", "wire"
WAIT, PLAN = "wait", "plan"
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_WATCHED = {"all_to_all_single": "all_to_all", _GATHER: "all_gather"}


@dataclass
class Transfer:
    """A collective. Times are `time.perf_counter()`, seconds.

    Attributes:
        name: "D0", "C3", or "plan".
        sent: bytes to other ranks.
        end: when the last row had arrived.
        waits: beginnings and ends.
    """

    name: str
    sent: int
    launch: float
    end: float | None = None
    waits: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Pass:
    """The forward or the backward of a call on one rank.

    Attributes:
        actions: name, end, chunks in flight and chunks that own buffers after it.
    """

    name: str
    begin: float
    end: float
    actions: list[tuple[str, float, int, int]]
    transfers: list[Transfer]


@dataclass
class Recording:
    """One call on one rank."""

    rank: int
    passes: list[Pass] = field(default_factory=list)

    @classmethod
    def read(cls, told: dict) -> Recording:
        """Back from `dataclasses.asdict`, JSON or not."""
        passes = [{**each, "transfers": [Transfer(**one) for one in each["transfers"]]} for each in told["passes"]]
        return cls(told["rank"], [Pass(**each) for each in passes])

    @property
    def begin(self) -> float:
        return self.passes[0].begin

    @property
    def seconds(self) -> float:
        return self.passes[-1].end - self.begin

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Record what happens in the block as the pass of this name."""
        transfers: list[Transfer] = []
        with observe() as events:
            watching: dict[str, Any] = {each: _watching(each, events, transfers) for each in _WATCHED}
            with mock.patch.multiple(dist, **watching):
                begin = time.perf_counter()
                yield
                end = time.perf_counter()
        actions = [
            (event.name, event.time, event.detail["in_flight"], event.detail["owners"])
            for event in events
            if event.kind == "action"
        ]
        self.passes.append(Pass(name, begin, end, actions, transfers))


def _watching(function: str, events: list[Event], transfers: list[Transfer]) -> Callable:
    original, kind = getattr(dist, function), _WATCHED[function]

    def launch(*args: Any, **kwargs: Any) -> _Watched | None:
        # the caller has just emitted what it launches for
        event = next((event for event in reversed(events) if event.kind == kind), None)
        name, sent = (event.name, sent_to_others([event])) if event else (kind, 0)
        transfer = Transfer(name, sent, time.perf_counter())
        transfers.append(transfer)
        work = original(*args, **kwargs)
        return None if work is None else _Watched(work, transfer)

    return launch


class _Watched:
    """A work that tells its transfer when it is done, and who waits for it."""

    def __init__(self, work: Any, transfer: Transfer) -> None:
        self._work, self._transfer = work, transfer
        if hasattr(work, "get_future"):  # a stand-in has none
            work.get_future().add_done_callback(self._done)

    def wait(self, *args: Any) -> Any:
        begin = time.perf_counter()
        result = self._work.wait(*args)
        end = time.perf_counter()
        self._transfer.waits.append((begin, end))
        self._done(None)
        return result

    def _done(self, _: object) -> None:
        # called by a thread of the back end, or else at the end of the wait: the first of the two is nearer
        if self._transfer.end is None:
            self._transfer.end = time.perf_counter()


class Slice(NamedTuple):
    """A stretch of a lane. `kind`: an action's letter, "launch", "wait", "plan" or "rest"."""

    lane: str
    name: str
    kind: str
    chunk: int | None
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def exposed(self) -> bool:
        """Whether computation waits for rows."""
        return self.kind == WAIT and self.chunk is not None


def lay_out(one: Pass) -> list[Slice]:
    """One compute lane, and as many wire lanes as there were transfers at once; spans of a lane do not overlap."""
    return [*_compute(one), *_wire(one.transfers)]


def _compute(one: Pass) -> Iterator[Slice]:
    cursor = next((each.launch for each in one.transfers if each.name == PLAN), one.begin)
    yield from _span(PLAN, PLAN, None, one.begin, cursor)
    waits = sorted((*wait, each.name) for each in one.transfers for wait in each.waits)
    for name, stop, *_ in one.actions:
        action = _action(name)
        kind, label = ("launch", f"launch {name}") if action and action.kind in "DC" else (name[:1], name)
        for start, until, awaited in waits:
            if cursor <= start and until <= stop:
                yield from _span(label, kind, action, cursor, start)
                yield Slice(COMPUTE, f"wait {awaited}", WAIT, _chunk(_action(awaited)), start, until)
                cursor = until
        yield from _span(label, kind, action, cursor, stop)
        cursor = stop
    yield from _span("rest", "rest", None, cursor, one.end)


def _span(name: str, kind: str, action: Action | None, start: float, end: float) -> Iterator[Slice]:
    if end > start:
        yield Slice(COMPUTE, name, kind, _chunk(action), start, end)


def _wire(transfers: list[Transfer]) -> Iterator[Slice]:
    ends: list[float] = []
    for each in sorted(transfers, key=lambda each: each.launch):
        action = _action(each.name)
        lane = next((number for number, end in enumerate(ends) if end <= each.launch), len(ends))
        end = each.launch if each.end is None else each.end  # None: nobody waited, and nobody told
        ends[lane:] = [end, *ends[lane + 1 :]]
        name = WIRE if lane == 0 else f"{WIRE}, {lane + 1} at once"
        yield Slice(name, each.name, action.kind if action else PLAN, _chunk(action), each.launch, end)


def _action(name: str) -> Action | None:
    return Action(name[0], int(name[1:])) if name[:1] in KINDS and name[1:].isdecimal() else None


def _chunk(action: Action | None) -> int | None:
    return None if action is None else action.chunk


class Summary(NamedTuple):
    """One pass, in seconds.

    Attributes:
        compute: without waiting.
        communication: with rows of at least one all-to-all on the wire.
        exposed: waiting for rows.
        plan: waiting for the gather of the plan.
        simulated: the whole, by the simulator.
        simulated_exposed: waiting for rows, by the simulator.
    """

    total: float
    compute: float
    communication: float
    exposed: float
    plan: float
    simulated: float
    simulated_exposed: float

    @property
    def hidden_share(self) -> float:
        """Of the communication; 1 where there is none."""
        return 1 - self.exposed / self.communication if self.communication else 1.0


def summarise(one: Pass) -> Summary:
    spans, timeline = lay_out(one), simulated(one)
    compute = [span for span in spans if span.lane == COMPUTE]
    waits = [span for span in compute if span.kind == WAIT]
    exposed = sum(span.length for span in waits if span.exposed)
    return Summary(
        total=one.end - one.begin,
        compute=sum(span.length for span in compute if span.kind != WAIT),
        communication=_covered([span for span in spans if span.lane != COMPUTE and span.chunk is not None]),
        exposed=exposed,
        plan=sum(span.length for span in waits) - exposed,
        simulated=timeline.total,
        simulated_exposed=timeline.exposed,
    )


def action_seconds(one: Pass) -> dict[str, float]:
    """The time of each kind of action: D and C on the wire, the others computing."""
    spans = [span for span in lay_out(one) if (span.lane == COMPUTE) != (span.kind in "DC")]
    return {kind: sum(span.length for span in spans if span.kind == kind) for kind in KINDS}


def simulated(one: Pass) -> Timeline:
    """The same actions in the same order, by the simulator.

    Costs: of an action, its measured time without waiting; of an all-to-all, the time from its launch to its end in
    which none before it was on the wire, so that two at once count as one after the other. Launches are free.
    """
    costs = dict.fromkeys(filter(None, (_action(name) for name, *_ in one.actions)), 0.0)
    busy_until = one.begin
    for span in sorted(lay_out(one), key=lambda span: span.start):
        if span.chunk is None or span.kind not in KINDS:
            continue
        action = Action(span.kind, span.chunk)
        if span.lane == COMPUTE:
            costs[action] += span.length
        else:
            costs[action] += max(0.0, span.end - max(span.start, busy_until))
            busy_until = max(busy_until, span.end)
    return simulate(tuple(costs), costs.__getitem__)


def lay_out_simulated(one: Pass) -> list[Slice]:
    """As measured ones, from the first action on; where the compute queue stands still, it waits."""
    first = next((span.start for span in lay_out(one) if span.kind in KINDS and span.lane == COMPUTE), one.begin)
    spans, cursor = [], first
    for (kind, chunk), begin, end in simulated(one).spans:
        begin, end = begin + first, end + first
        if kind in "DC":
            spans.append(Slice(WIRE, f"{kind}{chunk}", kind, chunk, begin, end))
            continue
        if begin > cursor:
            awaited = {"E": f"D{chunk}", "U": f"C{chunk}"}[kind]
            spans.append(Slice(COMPUTE, f"wait {awaited}", WAIT, chunk, cursor, begin))
        spans.append(Slice(COMPUTE, f"{kind}{chunk}", kind, chunk, begin, end))
        cursor = end
    return [span for span in spans if span.end > span.start]


def _covered(spans: list[Slice]) -> float:
    """The time in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total
