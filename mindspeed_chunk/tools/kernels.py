"""One layer call on a device, from the trace of the device's own profiler: which action had the device when.

The executor marks each action with a profiler range. The trace connects what the host launched in a range with what ran
on the device. What ran for D and C outside the stream of the matmuls was on the wire.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mindspeed_chunk.observe import Event
from mindspeed_chunk.tools.measure import sent_to_others
from mindspeed_chunk.tools.trace_record import PLAN, Pass, Transfer

FORWARD, BACKWARD = "forward", "backward"
_PREFIX = "chunkmoe::"
# of the arrows from a launch to its kernel: torch's profiler, and torch_npu's
_ARROWS = ("ac2g", "async_npu")
_RANGES = ("user_annotation", "cpu_op")


class _Span(NamedTuple):
    """On the host, a range; on the device, a kernel. In seconds."""

    name: str
    lane: tuple[Any, Any]
    start: float
    end: float


@contextlib.contextmanager
def marked(name: str) -> Iterator[None]:
    """The block has this name in the trace."""
    with torch.profiler.record_function(_PREFIX + name):
        yield


def record(kind: str, call: Callable[[], object], keep: Path) -> list[dict]:
    """The events of the call in Chrome's trace format, which the file `keep` gets, too."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile((_on_npu if kind == "npu" else _on_cuda)(call, Path(folder)), keep)
    content = json.loads(keep.read_text(encoding="utf-8"))
    return content if isinstance(content, list) else content["traceEvents"]


def _on_cuda(call: Callable[[], object], folder: Path) -> Path:
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]) as profile:
        call()
    profile.export_chrome_trace(str(folder / "trace.json"))
    return folder / "trace.json"


def _on_npu(call: Callable[[], object], folder: Path) -> Path:
    from torch_npu import profiler

    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder)),
        experimental_config=profiler._ExperimentalConfig(profiler_level=profiler.ProfilerLevel.Level1),
    ):
        call()
    return next(folder.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"))


def passes(events: list[dict], observed: Mapping[str, list[Event]]) -> list[Pass]:
    """The passes of a call, in the device's time.

    Args:
        observed: by the name of a pass, which is also the name of its range: what `observe` collected in it.

    Raises:
        ValueError: if the trace has no kernel for an action.
    """
    ranges, launched = list(_ranges(events)), list(_launched(events))
    experts = [each for each in ranges if each.name.startswith("E")]
    busy: dict[Any, float] = defaultdict(float)
    for at, kernel in launched:
        if any(each.start <= at <= each.end for each in experts):
            busy[kernel.lane] += kernel.end - kernel.start
    if not busy:
        raise ValueError("the profiler's trace connects no kernel with the experts' matmuls")
    compute, found, begin = max(busy, key=busy.__getitem__), [], 0.0
    for name, collected in observed.items():
        (whole,) = (each for each in ranges if each.name == name)
        inside = [(at, kernel) for at, kernel in launched if whole.start <= at <= whole.end]
        actions = {each.name: each for each in ranges if whole.start <= each.start and each.end <= whole.end}
        found.append(_pass(name, collected, actions, inside, compute, begin))
        begin = found[-1].end
    return found


def _ranges(events: list[dict]) -> Iterator[_Span]:
    for each in events:
        if each.get("ph") == "X" and each["name"].startswith(_PREFIX) and each.get("cat") in _RANGES:
            yield _span({**each, "name": each["name"].removeprefix(_PREFIX)})


def _launched(events: list[dict]) -> Iterator[tuple[float, _Span]]:
    """(time of the launch on the host, kernel)."""
    kernels = {_place(each): _span(each) for each in events if each.get("ph") == "X"}
    begins: dict[Any, list[dict]] = defaultdict(list)
    ends: dict[Any, list[dict]] = defaultdict(list)
    for each in events:
        if each.get("cat") in _ARROWS and each["ph"] in "sf":
            (begins if each["ph"] == "s" else ends)[each["id"]].append(each)
    for arrow, starts in begins.items():
        for start, end in zip(starts, ends[arrow]):
            if kernel := kernels.get(_place(end)):
                yield 1e-6 * float(start["ts"]), kernel


def _span(event: dict) -> _Span:
    start = 1e-6 * float(event["ts"])
    return _Span(event["name"], (event["pid"], event["tid"]), start, start + 1e-6 * float(event["dur"]))


def _place(event: dict) -> tuple:
    return event["pid"], event["tid"], float(event["ts"])


def _pass(
    name: str,
    collected: list[Event],
    ranges: Mapping[str, _Span],
    launched: list[tuple[float, _Span]],
    compute: Any,
    begin: float,
) -> Pass:
    """A gap on the compute stream counts as a wait: for the rows that the next action needs, as long as they are on the
    wire, and otherwise for the host, which waits for the plan or launches too late.
    """
    own = [kernel for _, kernel in launched if kernel.lane == compute]
    begin = max(begin, min((each.start for each in own), default=begin))
    sent = {each.name: sent_to_others([each]) for each in collected if each.kind == "all_to_all"}
    idle, transfers, actions, cursor = Transfer(PLAN, 0, begin, begin), {}, [], begin
    for event in (each for each in collected if each.kind == "action"):
        action, span = event.name, ranges[event.name]
        here = [kernel for at, kernel in launched if span.start <= at <= span.end]
        wire = [kernel for kernel in here if kernel.lane != compute]
        if action[0] in "DC" and wire:
            start, end = min(each.start for each in wire), max(each.end for each in wire)
            transfers[action] = Transfer(action, sent.get(action, 0), start, end)
        mine = [kernel for kernel in here if kernel.lane == compute]
        if mine:
            start, end = min(each.start for each in mine), max(each.end for each in mine)
            awaited = transfers.get({"E": "D", "U": "C"}.get(action[0], "") + action[1:])
            arrived = min(start, awaited.end or cursor) if awaited else cursor
            if awaited and arrived > cursor:
                awaited.waits.append((cursor, arrived))
            if start > max(cursor, arrived):
                idle.waits.append((max(cursor, arrived), start))
            cursor = max(cursor, end)
        actions.append((action, cursor, event.detail["in_flight"], event.detail["owners"]))
    end = max([cursor, *(each.end for each in own)])
    return Pass(name, begin, end, actions, [idle, *transfers.values()])
