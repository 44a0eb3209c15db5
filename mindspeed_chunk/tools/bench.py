"""Times one MoE layer for several schedules, numbers of chunks and memory modes, interleaved in one run.

    mindspeed-chunk bench --link 1gbit --json record.json --png record.png

A rank per device, over its collective library; on CPUs one thread per rank, over gloo, and with --link a network
namespace per rank. Values are checked before any time is printed: the functions of the back end and small layers in
bf16, compared with fp32 on the CPU; then every case, output and gradients, compared with the plain dispatcher. Then the
memory of every case is measured, and then each round runs every case once, in a rotating order. A time is that from a
barrier to the end of the slower rank. The table has medians and quartiles of the times, ratios of medians to the
baselines of the same run with the quartiles of each round's ratios, and the memory in units of the rows that a rank
sends.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mindspeed_chunk.command import run
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.output import console
from mindspeed_chunk.tools import bench_cases, bench_host, bench_report, devices, rates, stand_in
from mindspeed_chunk.tools.bench_cases import BenchCase
from mindspeed_chunk.tools.bench_layer import BenchLayer, check_cases, check_device
from mindspeed_chunk.tools.bench_report import UNLIMITED, Measured
from mindspeed_chunk.tools.layer_command import add_layer_options, check_file, check_layer, check_ranks, run_on_ranks
from mindspeed_chunk.tools.link import set_rate
from mindspeed_chunk.tools.parser import Parser, check_range

_WARM_UP = 2  # rounds
_MIDDLE_CHUNKS = 4  # rates are those of one of so many
_MOST_REPEATS = 100_000
_OVERHEAD_CASES = "rolling:1,rolling:4"
_OVERHEAD_SIZES = {"tokens": 16, "hidden": 16, "intermediate": 16, "top_k": 2}
_OVERHEAD_CALLS = 20  # a repeat


def main() -> int:
    return run_on_ranks(_parser(), "mindspeed_chunk.tools.bench", _check, _on_rank)


def _parser() -> Parser:
    parser = Parser(prog="mindspeed-chunk bench", description=__doc__, epilog=bench_cases.__doc__)
    parser.add_argument("--cases", metavar="CASE,...", help="see below; default: baselines and a short selection")
    add_layer_options(parser)
    parser.add_argument("--repeats", type=int, default=15, help="rounds that are timed, at least 3 (default: 15)")
    parser.add_argument(
        "--hidden-share",
        action="store_true",
        help="with --link: time every case without the limit, too, and show which share of the wire's own time for the "
        "bytes of a case is hidden",
    )
    parser.add_argument(
        "--overhead",
        action="store_true",
        help=f"the time of a layer call with tiny tensors, of {_OVERHEAD_CASES} where no cases are given: what Python "
        "costs; without peers, and between the ranks",
    )
    parser.add_argument("--json", metavar="FILE", help="write the record there")
    parser.add_argument(
        "--device-file",
        metavar="FILE",
        help="also measure the rates that `plan` reads in a device file, and compare the cases with its prediction",
    )
    parser.add_argument("--png", metavar="FILE", help="draw time and memory against the number of chunks")
    return parser


def _check(options: argparse.Namespace) -> dict[str, str]:
    check_ranks(options)
    if options.overhead:
        vars(options).update(_OVERHEAD_SIZES, experts=2 * options.ranks, routing="balanced", hidden_share=False)
        options.cases = options.cases or _OVERHEAD_CASES
    check_layer(options)
    check_range(options, {"repeats": (3, _MOST_REPEATS)})  # fewer have no quartiles
    if options.hidden_share and not options.link:
        raise ConfigError("--hidden-share: needs --link")
    if options.overhead and options.png:
        raise ConfigError("--png: there is nothing to draw of --overhead")
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png: needs matplotlib: pip install 'mindspeed_chunk[tools]'")
    if options.png and not options.png.endswith(".png"):
        raise ConfigError(f"--png {options.png}: must end in .png")
    for argument, path in (("--json", options.json), ("--png", options.png), ("--device-file", options.device_file)):
        if path is not None:
            check_file(argument, path)
    if options.device_file and options.dtype not in rates.FORMATS:
        raise ConfigError(f"--device-file: has no rates for {options.dtype}; use --dtype {' or '.join(rates.FORMATS)}")
    if options.device_file and (options.overhead or options.forward_only):
        raise ConfigError("--device-file: not with --overhead or --forward-only; leave these out")
    if options.device_file and options.tokens // _MIDDLE_CHUNKS * options.top_k * options.ranks < options.experts:
        raise ConfigError(f"--device-file: a chunk of {_MIDDLE_CHUNKS} has no row for each expert; add --tokens")
    names = bench_cases.names_of(options.cases)
    if any(name.endswith(":fill") for name in names) and not options.shared_expert:
        raise ConfigError("--cases: fill needs --shared-expert, the width of what fills")
    return bench_host.ENVIRONMENT if bench_cases.uses_host(names) else {}


def _on_rank(options: argparse.Namespace) -> None:
    names = bench_cases.names_of(options.cases)
    device = check_device(options)
    measured = _overhead(options, names) if options.overhead else measure(options, names)
    if options.device_file:
        device["rates"] = rates.measure(options, BenchLayer(options, dist.group.WORLD), _MIDDLE_CHUNKS)
    if dist.get_rank() == 0:
        bench_report.report(options, measured, device)


def measure(options: argparse.Namespace, names: list[str]) -> list[Measured]:
    """Values, memory and times of the cases. Raises ValuesDiffer on every rank or on none."""
    layer = BenchLayer(options, dist.group.WORLD)
    cases = [bench_cases.build(name) for name in names]
    links = [options.link or UNLIMITED, *([UNLIMITED] if options.hidden_share else [])]
    with _progress("values and memory", 1 + len(cases)) as advance:
        errors = check_cases(options, layer, cases)
        advance()
        found = {}
        for case in cases:
            found[case.name] = (layer.residency(case), layer.traffic(case))
            advance()
    seconds = _time(layer, cases, links, options.repeats)
    return [
        Measured(case.name, link, seconds[case.name, link], layer.unit, errors[case.name], *found[case.name])
        for link in links
        for case in cases
    ]


def _time(
    layer: BenchLayer, cases: list[BenchCase], links: list[str], repeats: int, calls: int = 1
) -> dict[tuple[str, str], list[float]]:
    """Seconds per call by case and link, one each round."""
    seconds: dict[tuple[str, str], list[float]] = {(case.name, link): [] for case in cases for link in links}
    with _progress("rounds", _WARM_UP + repeats) as advance:
        for round_ in range(_WARM_UP + repeats):
            first = round_ % len(cases)
            for link in links:
                _use(link, links)
                for case in cases[first:] + cases[:first]:
                    took = layer.time(case, calls)
                    if round_ >= _WARM_UP:
                        seconds[case.name, link].append(took)
            advance()
    return seconds


def _use(link: str, links: list[str]) -> None:
    """Change the links' rate, where there is more than one."""
    if len(links) > 1:
        devices.barrier()
        if dist.get_rank() == 0:
            (stand_in.set_rate if stand_in.is_played() else set_rate)(None if link == UNLIMITED else link)
        devices.barrier()


def _overhead(options: argparse.Namespace, names: list[str]) -> list[Measured]:
    """One call of each case, as the mean of some, without peers and between the ranks."""
    measured = []
    for place, group in ((bench_report.ALONE, None), (bench_report.TOGETHER, dist.group.WORLD)):
        layer = BenchLayer(options, group)
        cases = [bench_cases.build(name) for name in names]
        layer.check(cases)
        seconds = _time(layer, cases, [place], options.repeats, _OVERHEAD_CALLS)
        measured += [Measured(name, place, seconds[name, place], layer.unit) for name in names]
    return measured


@contextmanager
def _progress(what: str, steps: int) -> Iterator[Callable[[], None]]:
    """A function to call after each step; it moves a bar on rank 0 where that writes to a terminal."""
    screen = console(stderr=True)
    if dist.get_rank() != 0 or not screen.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), *Progress.get_default_columns()[1:2], MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=screen, transient=True) as bar:
        task = bar.add_task(what, total=steps)
        advance: Callable[[], None] = lambda: bar.advance(task)  # noqa: E731
        yield advance


if __name__ == "__main__":
    sys.exit(run(main))
