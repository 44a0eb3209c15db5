"""Shows one MoE layer call as a timeline: what ran, what was on the wire, and where the one waited for the other.

    mindspeed-chunk trace --case rolling:4 --link 1gbit --out layer

writes layer.html (one page, nothing else needed), layer.png, and layer.json in Chrome's trace format, which Perfetto
and MindStudio Insight open. On CPUs several calls are recorded; the one whose slowest rank is the median is shown. On a
device one call is recorded, by the device's profiler. Next to it is the result of the simulator for the same schedule
with the measured costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_chunk import files
from mindspeed_chunk.command import run
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.observe import Event, observe
from mindspeed_chunk.output import terminal, wide_console
from mindspeed_chunk.tools import devices, kernels, stand_in, trace_files
from mindspeed_chunk.tools.bench_cases import BenchCase, build, parse
from mindspeed_chunk.tools.bench_layer import BenchLayer, NoResult, check_cases, check_device
from mindspeed_chunk.tools.layer_command import add_layer_options, check_file, check_layer, run_on_ranks
from mindspeed_chunk.tools.parser import Parser, check_range
from mindspeed_chunk.tools.trace_record import Recording
from mindspeed_chunk.wording import shortened

_WARM_UP, _MOST_CALLS = 2, 1000
_ENDINGS = (".html", ".json", ".png")


def main() -> int:
    return run_on_ranks(_parser(), "mindspeed_chunk.tools.trace", _check, _on_rank)


def _parser() -> Parser:
    parser = Parser(prog="mindspeed-chunk trace", description=__doc__)
    parser.add_argument("--case", default="rolling:4", help="schedule:N[:mode], as in bench (default: rolling:4)")
    parser.add_argument("--out", default="trace", metavar="PREFIX", help="of the files' names (default: trace)")
    parser.add_argument("--calls", type=int, default=5, help="recorded on CPUs, of which one is shown (default: 5)")
    add_layer_options(parser)
    return parser


def _check(options: argparse.Namespace) -> dict[str, str]:
    check_layer(options)
    check_range(options, {"calls": (1, _MOST_CALLS)})
    try:
        parsed = parse(options.case)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None
    if parsed is None:
        rule = "it has no schedule to show; use schedule:N[:mode], such as rolling:4"
        raise ConfigError(f"--case {options.case}: {rule}")
    if options.out.endswith("/") or os.path.isdir(options.out):
        raise ConfigError(f"--out {shortened(options.out)}: is a folder; add the beginning of the files' names")
    for ending in _ENDINGS:
        check_file("--out", options.out + ending)
    return {}


def _on_rank(options: argparse.Namespace) -> None:
    check_device(options)
    layer, case = BenchLayer(options, dist.group.WORLD), build(options.case)
    check_cases(options, layer, [case])
    for _ in range(_WARM_UP):
        layer.run(case)
    own: object
    try:
        if options.device == "cpu":
            recorded = [record_call(layer, case) for _ in range(options.calls)]
        else:
            recorded = [_profiled_call(layer, case, Path(f"{options.out}.rank{dist.get_rank()}.json"))]
        own = [dataclasses.asdict(call) for call in recorded]
    except Exception as error:  # a profiler fails in many ways, and the other ranks wait in the gather
        own = f"{type(error).__name__}: {error}"
    by_rank = _gather(own)
    if errors := [f"rank {rank}: {each}" for rank, each in enumerate(by_rank) if isinstance(each, str)]:
        raise NoResult(f"no timeline: {'; '.join(errors)}")
    if dist.get_rank() == 0:
        _write(options, _middle([[Recording.read(each) for each in rank] for rank in by_rank]))


def record_call(layer: BenchLayer, case: BenchCase) -> Recording:
    """One call, all ranks starting together."""
    record = Recording(dist.get_rank())
    devices.barrier()
    with layer.around(case):
        with record.watch(kernels.FORWARD):
            out_TH = layer.forward(case)
        if not layer.forward_only:
            with record.watch(kernels.BACKWARD):
                layer.backward(out_TH)
    devices.barrier()  # no transfer is under way any more
    return record


def _profiled_call(layer: BenchLayer, case: BenchCase, keep: Path) -> Recording:
    observed: dict[str, list[Event]] = {}
    outputs: list[torch.Tensor] = []
    steps: dict[str, Callable[[], object]] = {kernels.FORWARD: lambda: outputs.append(layer.forward(case))}
    if not layer.forward_only:
        steps[kernels.BACKWARD] = lambda: layer.backward(outputs[0])

    def call() -> None:
        for name, step in steps.items():
            with layer.around(case), kernels.marked(name), observe() as observed[name]:
                step()
        devices.synchronize(layer.device)

    devices.barrier()
    trace = kernels.record(layer.kind, call, keep)
    return Recording(dist.get_rank(), kernels.passes(trace, observed))


def _gather(own_value: object) -> list:
    """The value of each rank, as JSON, on every rank. torch's own gather of objects needs numpy."""
    if stand_in.is_played():
        return [own_value]
    text = json.dumps(own_value).encode()
    size = torch.tensor([len(text)])
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    own = torch.full((int(size),), ord(" "), dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [json.loads(bytes(each.tolist())) for each in found]


def _middle(by_rank: list[list[Recording]]) -> list[Recording]:
    """Of the calls the median one, by its slowest rank: the records of all ranks."""
    calls = [list(records) for records in zip(*by_rank, strict=True)]
    return sorted(calls, key=lambda records: max(record.seconds for record in records))[len(calls) // 2]


def _write(options: argparse.Namespace, records: list[Recording]) -> None:
    """The files and the tables."""
    link = options.link or "not limited"
    title = f"{options.case}, {options.ranks} {options.device} ranks, link {link}, routing {options.routing}"
    sizes = f"{options.tokens} tokens per rank, hidden {options.hidden}, {options.experts} experts, top {options.top_k}"
    *written, picture = (options.out + ending for ending in _ENDINGS)
    files.write(Path(written[0]), trace_files.page(f"One MoE layer: {title}", sizes, records), "--out")
    files.write(Path(written[1]), json.dumps(trace_files.chrome(records)) + "\n", "--out")
    console = wide_console()
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no PNG: it needs matplotlib: pip install 'mindspeed_chunk[tools]'")
    else:
        trace_files.draw(title, records[0], picture)
        written.append(picture)
    for table in (trace_files.summary_table(title, records), trace_files.action_table(records)):
        console.print(terminal(table))
    if options.stand_in:
        console.print(stand_in.NOTE)
    console.print("written:", ", ".join(written))


if __name__ == "__main__":
    sys.exit(run(main))
