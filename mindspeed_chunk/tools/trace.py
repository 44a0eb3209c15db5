"""Shows one MoE layer call as a timeline: what ran, what was on the wire, and where the one waited for the other.

    mindspeed-chunk trace --case rolling:4 --link 1gbit --out layer

writes layer.html (one page, nothing else needed), layer.png, and layer.json in Chrome's trace format, which Perfetto
and MindStudio Insight open. Several calls are recorded; the one whose slowest rank is the median is shown. Beside it
stands what the simulator makes of the same schedule with the measured costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_chunk import files
from mindspeed_chunk.command import run, variable
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.dist import destroy
from mindspeed_chunk.output import terminal, wide_console
from mindspeed_chunk.tools import trace_files
from mindspeed_chunk.tools.bench_cases import Case, CaseError, build, parse
from mindspeed_chunk.tools.bench_layer import Layer, ValuesDiffer, add_layer_options, problem_of
from mindspeed_chunk.tools.link import LinkError
from mindspeed_chunk.tools.parser import Parser, check_range
from mindspeed_chunk.tools.ranks import is_rank, launch
from mindspeed_chunk.tools.trace_record import Record
from mindspeed_chunk.wording import shortened

_WARM_UP, _MOST_CALLS = 2, 1000


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if is_rank():
        options.ranks = variable("WORLD_SIZE", 1)
    problem = problem_of(options) or _problem(options)
    if problem:
        parser.error(problem)
    if is_rank():
        return _rank_main(options)
    try:
        return launch("mindspeed_chunk.tools.trace", sys.argv[1:], options.ranks, options.link)
    except LinkError as error:
        parser.error(str(error))


def _parser() -> Parser:
    parser = Parser(prog="mindspeed-chunk trace", description=__doc__)
    parser.add_argument("--case", default="rolling:4", help="schedule:N[:mode], as in bench (default: rolling:4)")
    parser.add_argument("--out", default="trace", metavar="PREFIX", help="of the files' names (default: trace)")
    parser.add_argument("--calls", type=int, default=5, help="recorded, of which one is shown (default: 5)")
    add_layer_options(parser)
    return parser


def _problem(options: argparse.Namespace) -> str | None:
    try:
        if parse(options.case) is None:
            return f"--case {options.case}: it has no schedule to show; use schedule:N[:mode], such as rolling:4"
        check_range(options, {"calls": (1, _MOST_CALLS)})
    except CaseError as error:
        return f"--{error}"
    except ConfigError as error:
        return str(error)
    if options.out.endswith("/") or os.path.isdir(options.out):
        return f"--out {shortened(options.out)}: is a folder; add the beginning of the files' names"
    folder = os.path.dirname(options.out) or "."
    return None if os.path.isdir(folder) else f"--out {shortened(options.out)}: there is no folder {shortened(folder)}"


def _rank_main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layer, case = Layer(options, dist.group.WORLD), build(options.case)
    try:
        layer.check([case])
    except ValuesDiffer as error:
        if dist.get_rank() == 0:
            print(f"error: {error}; nothing is shown", file=sys.stderr)
        destroy()
        return 1
    for _ in range(_WARM_UP):
        layer.run(case)
    calls = [record_call(layer, case) for _ in range(options.calls)]
    by_rank = _gather([dataclasses.asdict(call) for call in calls])
    if dist.get_rank() == 0:
        _write(options, _middle([[Record.read(told) for told in rank] for rank in by_rank]))
    dist.barrier()
    destroy()
    return 0


def record_call(layer: Layer, case: Case) -> Record:
    """One call, all ranks starting together."""
    record = Record(dist.get_rank())
    dist.barrier()
    with case.around, torch.set_grad_enabled(not layer.forward_only):
        with record.direction("forward"):
            out_TH = layer.forward(case)
        if not layer.forward_only:
            with record.direction("backward"):
                layer.backward(out_TH)
    dist.barrier()  # no transfer is under way any more
    return record


def _gather(told: object) -> list:
    """What each rank tells, as JSON, on every rank. torch's own gather of objects needs numpy."""
    text = json.dumps(told).encode()
    size = torch.tensor([len(text)])
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    own = torch.full((int(size),), ord(" "), dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [json.loads(bytes(each.tolist())) for each in found]


def _middle(by_rank: list[list[Record]]) -> list[Record]:
    """Of the calls the median one, by its slowest rank: the records of all ranks."""
    calls = [list(records) for records in zip(*by_rank, strict=True)]

    def slowest(records: list[Record]) -> float:
        return max(record.directions[-1][2] - record.directions[0][1] for record in records)

    return sorted(calls, key=slowest)[len(calls) // 2]


def _write(options: argparse.Namespace, records: list[Record]) -> None:
    title = f"{options.case}, {options.ranks} ranks, link {options.link or 'not limited'}, routing {options.routing}"
    sizes = f"{options.tokens} tokens a rank, hidden {options.hidden}, {options.experts} experts, top {options.top_k}"
    written = [f"{options.out}.html", f"{options.out}.json"]
    files.write(Path(written[0]), trace_files.page(f"One MoE layer: {title}", sizes, records), "--out")
    files.write(Path(written[1]), json.dumps(trace_files.chrome(records)) + "\n", "--out")
    console = wide_console()
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no PNG: it needs matplotlib: pip install 'mindspeed_chunk[tools]'")
    else:
        written.append(f"{options.out}.png")
        trace_files.draw(title, records[0], written[-1])
    console.print(terminal(trace_files.summary_table(title, records)))
    console.print("written:", ", ".join(written))


if __name__ == "__main__":
    sys.exit(run(main))
