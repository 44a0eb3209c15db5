"""Checks this package on the devices of this machine, and writes one folder to send.

    mindspeed-chunk check --device npu --out FOLDER

In this order: the environment; values, and rows between devices bit for bit (after a wrong one, nothing is timed);
time, hidden share and memory of a layer of Qwen3.5-35B's size in bf16, for each schedule, number of chunks and memory
mode; measured rates, as a device file of `plan`; one call by the device's profiler. With one device, its peers are
played. Without a device it says so and ends with exit code 0. FOLDER gets record.json, report.txt, device.yaml,
layer.html, .json and .png, and profile.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch.distributed as dist
import yaml

from mindspeed_chunk import files
from mindspeed_chunk.command import run
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.output import console
from mindspeed_chunk.tools import (
    bench,
    bench_cases,
    bench_report,
    bench_values,
    devices,
    environment,
    layer_command,
    rates,
    trace,
)  # fmt: skip
from mindspeed_chunk.tools.bench_layer import BenchLayer, NoResult, refuse_wrong
from mindspeed_chunk.tools.parser import Parser, check_range
from mindspeed_chunk.tools.trace_record import action_seconds, summarise

_SIZE = {"tokens": 16384, "hidden": 2048, "intermediate": 512, "top_k": 8, "dtype": "bfloat16"}
_EXPERTS_PER_RANK = 32
_STAND_IN_LINK = "400gbit"
_PROFILED, _CHUNKS = "rolling:4", 4
_WIDTH = 150


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if reason := devices.missing(options.device):
        print(f"skipped: {reason}")
        return 0
    if options.device != "cpu" and devices.count(options.device) == 1:
        parser.set_defaults(stand_in=True)
    return layer_command.run_on_ranks(parser, "mindspeed_chunk.tools.check", _check, _on_rank)


def _parser() -> Parser:
    parser = Parser(prog="mindspeed-chunk check", description=__doc__, epilog=bench_cases.__doc__)
    parser.add_argument("--out", required=True, metavar="FOLDER")
    parser.add_argument("--cases", metavar="CASE,...", default="all", help="see below (default: all)")
    parser.add_argument("--repeats", type=int, default=9, help="rounds that are timed, at least 3 (default: 9)")
    layer_command.add_layer_options(parser)
    parser.set_defaults(**_SIZE, experts=None, overhead=False)
    return parser


def _check(options: argparse.Namespace) -> dict[str, str]:
    layer_command.check_ranks(options)
    if options.stand_in:
        options.link = options.link or _STAND_IN_LINK
    options.hidden_share = bool(options.link)
    options.experts = options.experts or _EXPERTS_PER_RANK * options.ranks
    layer_command.check_layer(options)
    check_range(options, {"repeats": (3, 1000)})
    bench_cases.names_of(options.cases)
    if options.dtype not in rates.FORMATS:
        raise ConfigError.about("--dtype", options.dtype, "a device file has no rates for it", "use bfloat16")
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError.about("--out", options.out, f"cannot be made: {error.strerror}", "give another") from None
    return {}


class _Report:
    """record.json and report.txt of rank 0, written after each stage: what ends early leaves what it has found."""

    def __init__(self, folder: str) -> None:
        self.first = dist.get_rank() == 0
        self.folder, self.record = Path(folder), {}
        self.screen = console(record=True, width=_WIDTH, quiet=not self.first)

    def add(self, line: str = "", **found: object) -> None:
        self.record |= found
        if line:
            self.screen.print(line)
        if self.first:
            files.write(self.folder / "record.json", json.dumps(self.record, indent=1) + "\n", "--out")
            files.write(self.folder / "report.txt", self.screen.export_text(clear=False), "--out")


def _on_rank(options: argparse.Namespace) -> None:
    report, kind = _Report(options.out), options.device
    environs = environment.of_device(kind)
    report.add("\n".join(["warning: " + each for each in environs["warnings"]]), environment=environs)
    _values(options, report)
    measured = bench.measure(options, bench_cases.names_of(options.cases))
    best = bench_report.recommended(measured)
    if report.first:
        bench_report.show(options, measured, report.screen)
        line = f"recommended: {best.case}, the fewest chunks within 2 % of the fastest case" if best else ""
        report.add(line, times=bench_report.record(options, measured), recommended=best and best.case)
    layer = BenchLayer(options, dist.group.WORLD)
    found = rates.measure(options, layer, _CHUNKS)
    report.add(rates=found)
    if report.first:
        files.write(report.folder / "device.yaml", yaml.safe_dump(found, sort_keys=False), "--out")
    _profile(options, layer, report)
    report.add(f"{devices.name(kind)}: values are right; results are in {options.out}, a folder to send")


def _values(options: argparse.Namespace, report: _Report) -> None:
    """Raises NoResult on every rank if a value is wrong on one."""
    place = devices.here(options.device)
    values = list(bench_values.check(place))
    report.add(values=[each._asdict() for each in values])
    refuse_wrong(values)
    line = f"values: {len(values)} comparisons with fp32 on the CPU, all right"
    if not options.stand_in:
        arrived, rate = bench_values.wire(place)
        refuse_wrong([arrived])
        by_rank = trace.gather(rate)
        line += f"; all-to-all over {devices.COLLECTIVES[options.device]}, {options.ranks} ranks: every row arrived, "
        line += f"{min(by_rank) / 1e9:.3g} GB/s or more from each rank"
        report.add(wire_bytes_per_s=by_rank)
    report.add(line)


def _profile(options: argparse.Namespace, layer: BenchLayer, report: _Report) -> None:
    """A timeline of one call. Without one, the rest of the report is complete."""
    keep = report.folder / "profile.json" if report.first and options.device != "cpu" else None
    try:
        records = trace.record_calls(layer, bench_cases.build(_PROFILED), 1, keep)
    except NoResult as error:
        report.add(f"no timeline: {error}", profile=str(error))
        return
    if report.first:
        named = {**vars(options), "case": _PROFILED, "out": str(report.folder / "layer")}
        trace.write(argparse.Namespace(**named), records, report.screen)
    passes = [(record.rank, one, summarise(one)) for record in records for one in record.passes]
    report.add(profile=[
        {"rank": rank, "pass": one.name, "ms_by_action": {kind: 1e3 * s for kind, s in action_seconds(one).items()},
         "hidden_share": summary.hidden_share, **summary._asdict()}
        for rank, one, summary in passes
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(run(main))
