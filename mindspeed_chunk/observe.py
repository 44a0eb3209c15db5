"""One channel on which the running code reports its collectives, host copies and schedule actions.

Counters, order checks, residency checks and timelines all listen here, so none of them needs its own record. Without a
listener, `emit` is one truth test.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened on this rank.

    Attributes:
        kind: "all_to_all", "all_gather", "all_reduce", "host_copy" or "action"; the embedded trainer adds "phase" and
            "layer", which give the place of the others in a step.
        name: what it was for: an action's text ("D0"), or the purpose of a collective ("plan").
        detail: sizes and counts, by name; see the code that emits it.
        time: `time.perf_counter()` at the launch, seconds.
    """

    kind: str
    name: str
    detail: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.perf_counter)


_listeners: list[list[Event]] = []


def listening() -> bool:
    """Whether there is a listener, for callers whose details are expensive to collect."""
    return bool(_listeners)


def emit(kind: str, name: str, **detail: Any) -> None:
    """Report to every listener. Called from any thread that runs the forward or the backward."""
    if _listeners:
        event = Event(kind, name, detail)
        for log in _listeners:
            log.append(event)


@contextmanager
def observe() -> Iterator[list[Event]]:
    """Collect the events of this process while the block runs.

    Example:
        with observe() as events:
            model(batch).loss.backward()
        exchanges = sum(event.kind == "all_to_all" for event in events)
    """
    log: list[Event] = []
    _listeners.append(log)
    try:
        yield log
    finally:
        # by identity: two logs with equal contents are still two listeners
        _listeners[:] = [other for other in _listeners if other is not log]
