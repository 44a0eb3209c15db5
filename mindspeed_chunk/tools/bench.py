"""Times one MoE layer, forward plus backward, for several schedules and numbers of chunks, interleaved in one run.

    python -m mindspeed_chunk.tools.bench --link 1gbit

Two ranks, one core each, over gloo; with --link in two network namespaces. Values are checked before any time is
printed: every case against the plain dispatcher. Each round runs every case once, in a rotating order; a time runs from
a barrier to the end of the slower rank. The table has medians and quartiles, of the times and of each round's ratios to
the first case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.dist import destroy
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.tools.link import LinkError, limited_link

_RANKS = 2
_TOLERANCE = 1e-4  # relative to the largest value; fp32 sums in another order


def main() -> int:
    options = _options()
    if "RANK" in os.environ:
        _rank_main(options)
        return 0
    link = limited_link(options.link) if options.link else nullcontext([([], {})] * _RANKS)
    try:
        with link as places:
            return _launch(places)
    except LinkError as error:
        print(error, file=sys.stderr)
        return 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mindspeed_chunk.tools.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--link", metavar="RATE", help="limit the link between the ranks, such as 1gbit; needs root")
    parser.add_argument("--cases", default="rolling:1,rolling:2,rolling:4,rolling:8,pair:4,alltoall")
    parser.add_argument("--tokens", type=int, default=2048, help="per rank")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="write the record there")
    return parser.parse_args()


def _launch(places: list[tuple[list[str], dict[str, str]]]) -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank, (prefix, extra) in enumerate(places):
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(_RANKS),
            "RANK": str(rank),
            "OMP_NUM_THREADS": "1",
        }
        command = [*prefix, sys.executable, "-m", "mindspeed_chunk.tools.bench", *sys.argv[1:]]
        ranks.append(subprocess.Popen(command, env={**os.environ, **environment, **extra}))
    codes = [process.wait() for process in ranks]
    return max(map(abs, codes))


def _rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layer = _Layer(options)
    cases = {name: _dispatcher(name) for name in options.cases.split(",")}
    layer.check(cases)
    names = list(cases)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-2, options.repeats):  # two rounds to warm up
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            seconds = layer.time(cases[name])
            if round_ >= 0:
                times[name].append(seconds)
    if dist.get_rank() == 0:
        _report(options, times)
    dist.barrier()
    destroy()


def _dispatcher(case: str) -> AllToAllDispatcher | ChunkMoEDispatcher:
    """`alltoall`, or `schedule:N`, with `:recompute` behind it."""
    if case == "alltoall":
        return AllToAllDispatcher()
    schedule, chunks, *rest = case.split(":")
    return ChunkMoEDispatcher(
        ChunkMoEConfig(
            moe_num_chunks=int(chunks), chunk_moe_schedule=schedule, chunk_moe_recompute=rest == ["recompute"]
        )
    )


class _Layer:
    """The tensors of one rank's layer: balanced random routing, fp32."""

    def __init__(self, options: argparse.Namespace) -> None:
        rank, self.num_experts = dist.get_rank(), options.experts
        generator = torch.Generator().manual_seed(rank)
        local, hidden, width = options.experts // _RANKS, options.hidden, options.intermediate

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).requires_grad_()

        self.x_TH = normal(options.tokens, hidden)
        self.index_TK = torch.rand(options.tokens, options.experts, generator=generator).topk(options.top_k).indices
        self.weight_TK = normal(options.tokens, options.top_k)
        self.fc1_LHF = normal(local, hidden, 2 * width, scale=hidden**-0.5)
        self.fc2_LIH = normal(local, width, hidden, scale=width**-0.5)
        self.grad_TH = torch.randn(options.tokens, hidden, generator=generator)

    def run(self, dispatcher: AllToAllDispatcher | ChunkMoEDispatcher) -> tuple[torch.Tensor, ...]:
        """The output and all gradients."""
        inputs = (self.x_TH, self.weight_TK, self.fc1_LHF, self.fc2_LIH)
        out_TH = dispatcher(
            self.num_experts, self.weight_TK, self.index_TK, self.x_TH, self.fc1_LHF, self.fc2_LIH, dist.group.WORLD
        )
        return out_TH.detach(), *torch.autograd.grad(out_TH, inputs, self.grad_TH)

    def check(self, cases: dict[str, AllToAllDispatcher | ChunkMoEDispatcher]) -> None:
        expected = self.run(AllToAllDispatcher())
        for name, dispatcher in cases.items():
            results = zip(("out", "x", "weight", "fc1", "fc2"), self.run(dispatcher), expected, strict=True)
            for what, got, want in results:
                error = ((got - want).abs().max() / want.abs().max()).item()
                if not error < _TOLERANCE:
                    raise SystemExit(f"{name}: {what} is off the plain dispatcher's by {error:.1e}; no times printed")

    def time(self, dispatcher: AllToAllDispatcher | ChunkMoEDispatcher) -> float:
        """Seconds of the slower rank."""
        dist.barrier()
        start = time.perf_counter()
        self.run(dispatcher)
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()


def _report(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    first = next(iter(times))
    table = Table(title=f"one layer, forward + backward, {_RANKS} ranks, link {options.link or 'not limited'}")
    for column in ("case", "median ms", "quartiles ms", f"ratio to {first}", "quartiles"):
        table.add_column(column, justify="left" if column == "case" else "right")
    rows = []
    for name, seconds in times.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        ratios = [own / base for own, base in zip(seconds, times[first], strict=True)]
        ratio_low, ratio, ratio_high = statistics.quantiles(ratios, n=4)
        table.add_row(
            name, f"{middle:.1f}", f"{low:.1f} - {high:.1f}", f"{ratio:.3f}", f"{ratio_low:.3f} - {ratio_high:.3f}"
        )
        rows.append({"case": name, "ms": [1e3 * value for value in seconds], "ratio_to_first": ratios})
    Console().print(table)
    if options.json:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
            "torch": torch.__version__,
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "cases": rows,
        }
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
