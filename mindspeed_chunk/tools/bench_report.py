"""What the layer benchmark has found, as a table, a JSON record and a PNG."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

import mindspeed_chunk
from mindspeed_chunk import files
from mindspeed_chunk.config import DISPATCHES, KEEPS
from mindspeed_chunk.output import Table, drawable, terminal, wide_console
from mindspeed_chunk.planner import LayerShape, chunk_times, load_device
from mindspeed_chunk.tools import environment, rates, stand_in
from mindspeed_chunk.tools.bench_cases import BASELINES, Parsed, parse
from mindspeed_chunk.tools.bench_layer import Residency, Traffic
from mindspeed_chunk.tools.link import bits_per_second

UNLIMITED = "not limited"
_HARDLY_SLOWER = 1.02
# places of the overhead's measurement
ALONE, TOGETHER = "without peers", "between the ranks"


@dataclasses.dataclass(frozen=True)
class Measured:
    """One case on one link.

    Attributes:
        seconds: of the slower rank, one a round; rounds are the same for all cases.
        unit: bytes; memory is in this unit.
        error: largest relative difference to the plain dispatcher's values.
    """

    case: str
    link: str
    seconds: Sequence[float]
    unit: int
    error: float = 0.0
    residency: Residency | None = None
    traffic: Traffic | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return low, high

    def memory(self) -> tuple[float, float]:
        """Kept and peak, in units; for a case of which both were measured."""
        assert self.residency is not None
        kept, peak = self.residency
        return kept / self.unit, peak / self.unit

    def ratio(self, base: Measured) -> tuple[float, float, float]:
        """The ratio of the medians, and the quartiles of each round's ratio."""
        low, _, high = statistics.quantiles([own / other for own, other in zip(self.seconds, base.seconds)], n=4)
        return self.median / base.median, low, high


def report(options: argparse.Namespace, measured: list[Measured], device: dict[str, Any]) -> None:
    """Print the tables, and write the files that the options name.

    Args:
        device: what else is known about it, for the record: its values, and maybe its rates.
    """
    screen, found = wide_console(), record(options, measured, device)
    for line in found["environment"]["warnings"]:
        screen.print(f"warning: {line}")
    for table in _tables(options, measured):
        screen.print(terminal(table))
    rate = device["wire_gb_per_s"]
    arrived = f"; every row arrived, {rate:.3g} GB/s or more from each rank" if rate else ""
    screen.print(f"{len(device['values'])} values compared with fp32 on the CPU, all right{arrived}")
    if options.stand_in:
        screen.print(stand_in.NOTE)
    if found["recommended"]:
        screen.print(f"recommended: {found['recommended']}, the fewest chunks within 2 % of the fastest case")
    if options.json:
        files.write(Path(options.json), json.dumps(found, indent=1) + "\n", "--json")
    if options.device_file:
        files.write(Path(options.device_file), yaml.safe_dump(device["rates"], sort_keys=False), "--device-file")
        screen.print(terminal(_planned_table(options, measured)))
    if options.png:
        draw(options, measured)


def recommended(measured: list[Measured]) -> str | None:
    """The case with the fewest chunks among those that keep activations and are hardly slower than the fastest."""
    first = [each for each in measured if each.link == measured[0].link]
    chunked = [(found.chunks, each) for each in first if (found := parse(each.case)) and found.keep == KEEPS[0]]
    fastest = min((each.median for _, each in chunked), default=0.0)
    near = [each for each in chunked if each[1].median <= _HARDLY_SLOWER * fastest]
    return min(near, key=lambda each: (each[0], each[1].median))[1].case if near else None


def baselines(measured: list[Measured]) -> list[Measured]:
    """Of one link; the first case where none of the known baselines takes part."""
    found = [each for name in BASELINES for each in measured if each.case == name]
    return found or measured[:1]


def hidden_share(options: argparse.Namespace, limited: Measured, free: Measured) -> float | None:
    """1 - (time on the link - time without a limit) / (bytes that a rank sends in its all-to-alls / rate of the link).

    None without the number of bytes.
    """
    if limited.traffic is None:
        return None
    return 1 - (limited.median - free.median) / (8 * limited.traffic.sent / bits_per_second(options.link))


def record(options: argparse.Namespace, measured: list[Measured], device: dict[str, Any]) -> dict:
    """Everything about a run, for JSON."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "environment": environment.of_device(options.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mindspeed_chunk": mindspeed_chunk.__version__,
        "options": {key: value for key, value in vars(options).items() if key not in ("json", "png", "device_file")},
        **device,
        "recommended": recommended(measured),
        "memory_unit_bytes": measured[0].unit,
        "cases": [_entry(options, each, measured) for each in measured],
    }


def _entry(options: argparse.Namespace, one: Measured, measured: list[Measured]) -> dict:
    beside = [each for each in measured if each.link == one.link]
    free = next((each for each in measured if each.case == one.case and each.link == UNLIMITED), None)
    entry: dict = {
        "case": one.case,
        "link": one.link,
        "median_ms": 1e3 * one.median,
        "quartiles_ms": [1e3 * value for value in one.quartiles()],
        "ms": [1e3 * value for value in one.seconds],
        "ratios": {base.case: dict(zip(("of_medians", "low", "high"), one.ratio(base))) for base in baselines(beside)},
        "largest_difference": one.error,
    }
    if one.residency:
        entry["kept"], entry["peak"] = one.memory()
    if one.traffic:
        entry["exchanges"], entry["sent_bytes"] = one.traffic
    if options.hidden_share and one.link != UNLIMITED and free is not None:
        entry["hidden_share"] = hidden_share(options, one, free)
    return entry


def _processor() -> str:
    """Its model where the system shows it, else its architecture."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _tables(options: argparse.Namespace, measured: list[Measured]) -> Iterator[Table]:
    make = _overhead_table if options.overhead else _case_table
    for link in dict.fromkeys(each.link for each in measured):
        yield make(options, link, [each for each in measured if each.link == link])
    if options.hidden_share:
        yield _hidden_table(options, measured)


def _case_table(options: argparse.Namespace, link: str, measured: list[Measured]) -> Table:
    bases = baselines(measured)
    rows = [
        (one.case, _milliseconds(one), *map(_ratio, map(one.ratio, bases)), *(f"{units:.2f}" for units in one.memory()))
        for one in measured
    ]
    return Table(
        f"one layer, {_passes(options)}, {options.ranks} {options.device} ranks, {options.dtype}, "
        f"routing {options.routing}, link {link}",
        ("case", "ms", *(f"to {base.case}" for base in bases), "kept", "peak"),
        rows,
        note=f"{_medians(options)}\nkept and peak: live bytes between forward and backward, and the most at once; "
        f"1 = the rows that a rank sends ({measured[0].unit / 2**20:.1f} MiB)",
    )


def _overhead_table(options: argparse.Namespace, place: str, measured: list[Measured]) -> Table:
    return Table(
        f"a layer call with tiny tensors, {_passes(options)}, {place}",
        ("case", "ms per call", f"to {measured[0].case}"),
        [(one.case, _milliseconds(one, 3), _ratio(one.ratio(measured[0]))) for one in measured],
        note=_medians(options),
    )


def _hidden_table(options: argparse.Namespace, measured: list[Measured]) -> Table:
    limited, free = ([each for each in measured if (each.link == UNLIMITED) == is_free] for is_free in (False, True))
    rows = [
        (
            one.case,
            str(one.traffic.exchanges),
            f"{one.traffic.sent / 1e6:.1f}",
            f"{8e3 * one.traffic.sent / bits_per_second(options.link):.0f}",
            f"{hidden_share(options, one, other):.0%}",
        )
        for one, other in zip(limited, free, strict=True)
        if one.traffic
    ]
    title = f"share of the wire's own time that is hidden, link {options.link}"
    return Table(title, ("case", "all-to-alls", "MB sent", "wire ms", "hidden"), rows)


def _planned_table(options: argparse.Namespace, measured: list[Measured]) -> Table:
    """The time relative to the first case with a schedule: as measured, and as `plan` predicts it."""
    shape = LayerShape(
        tokens=options.tokens, hidden=options.hidden, intermediate=options.intermediate, experts=options.experts,
        top_k=options.top_k, ep=options.ranks, element_size=getattr(torch, options.dtype).itemsize,
    )  # fmt: skip
    device, dtype, rows, first = load_device(options.device_file), rates.FORMATS[options.dtype], [], None
    for one in (each for each in measured if each.link == measured[0].link):
        if (found := parse(one.case)) and set(found.words) <= {*KEEPS, *DISPATCHES}:
            this = dataclasses.replace(shape, dispatch=found.dispatch)
            how: dict[str, Any] = {"num_chunks": found.chunks, "schedule": found.schedule, "keep": found.keep}
            seconds = chunk_times(this, device, dtype=dtype, **how).total
            base, planned = first = first or (one, seconds)
            ratio, predicted = one.ratio(base), seconds / planned
            rows.append((one.case, _ratio(ratio), f"{predicted:.2f}", f"{predicted / ratio[0] - 1:+.1%}"))
    return Table(f"as planned from {options.device_file}", ("case", "measured", "planned", "error"), rows)


def _passes(options: argparse.Namespace) -> str:
    return "forward" if options.forward_only else "forward + backward"


def _medians(options: argparse.Namespace) -> str:
    return f"medians of {options.repeats} interleaved rounds (quartiles)"


def _milliseconds(one: Measured, digits: int = 1) -> str:
    low, high = one.quartiles()
    return f"{1e3 * one.median:.{digits}f} ({1e3 * low:.{digits}f} - {1e3 * high:.{digits}f})"


def _ratio(ratio: tuple[float, float, float]) -> str:
    middle, low, high = ratio
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


def draw(options: argparse.Namespace, measured: list[Measured]) -> None:
    """Time and memory against the number of chunks, of the first link; baselines as lines across."""
    from matplotlib.figure import Figure

    first = [each for each in measured if each.link == measured[0].link]
    curves = _curves(first)
    figure = Figure(figsize=(13, 5), layout="constrained")
    times, memory = figure.subplots(1, 2)
    for number, (label, curve) in enumerate(curves.items()):
        _draw_curve(times, memory, curve, color=f"C{number}", label=label)
    for number, base in enumerate(each for each in first if parse(each.case) is None):
        style: dict[str, Any] = {"color": f"{0.15 * number}", "linestyle": ("--", "-.")[number % 2]}
        times.axhline(1e3 * base.median, label=base.case, **style)
        memory.axhline(base.memory()[1], **style)
    times.set(
        ylabel="ms per layer call",
        title=drawable(f"time: median and quartiles, link {measured[0].link}"),
        ylim=(0, None),
    )
    memory.set(ylabel="1 = the rows that a rank sends", title="memory: peak; dotted: kept", ylim=(0, None))
    ticks = sorted({chunks for curve in curves.values() for chunks, _ in curve})
    for axes in (times, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.set_xlabel("chunks")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    files.write_figure(Path(options.png), figure, "--png")


def _draw_curve(times: Any, memory: Any, curve: list[tuple[int, Measured]], color: str, label: str) -> None:
    chunks, found = [chunks for chunks, _ in curve], [one for _, one in curve]
    medians = [1e3 * one.median for one in found]
    below, above = ([1e3 * abs(one.median - one.quartiles()[side]) for one in found] for side in (0, 1))
    times.errorbar(chunks, medians, yerr=[below, above], marker="o", capsize=3, color=color, label=label)
    memory.plot(chunks, [one.memory()[1] for one in found], marker="o", color=color)
    memory.plot(chunks, [one.memory()[0] for one in found], ":", marker="o", color=color)


def _curves(measured: list[Measured]) -> dict[str, list[tuple[int, Measured]]]:
    """By schedule and memory mode, in order of chunks; one chunk is the same in all schedules."""
    parsed: list[tuple[Parsed, Measured]] = [(found, each) for each in measured if (found := parse(each.case))]
    curves = {}
    for schedule, mode in dict.fromkeys((found.schedule, found.mode) for found, _ in parsed if found.chunks > 1):
        points = [
            (found.chunks, each)
            for found, each in parsed
            if found.mode == mode and (found.schedule == schedule or found.chunks == 1)
        ]
        curves[schedule if mode == KEEPS[0] else f"{schedule}, {mode}"] = sorted(points, key=lambda point: point[0])
    return curves
