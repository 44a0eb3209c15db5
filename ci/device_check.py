"""Values, times and memory of the MoE layer on one device, and between devices where there are several.

    python ci/device_check.py --device cuda --out DIR      (ci/gpu_check.sh does this)
    python ci/device_check.py --device cpu --out DIR       the same with tiny sizes, to try this script

First it compares every operation of the back end and the whole layer, forward and backward, in bf16 with fp32 on the
CPU. If a value is wrong, nothing is timed. Then it runs one rank of a layer of Qwen3.5-35B's size, of 8 ranks that all
have the same routing. The data of its collectives is copied on a side stream, which is blocked for the time that the
link would take (--gigabytes). Last, with several devices, the layer runs between them with the real collectives. Prints
one table, and writes DIR/record.json and a profiler trace.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from device_values import layer_errors, offload_error, op_errors, waits
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindspeed_chunk import dist as chunk_dist
from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig
from mindspeed_chunk.device import Copy, accelerator
from mindspeed_chunk.moe import dispatcher as moe_dispatcher
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher

RANK_LIMIT_S = 150


@dataclass(frozen=True)
class Size:
    tokens: int = 16384
    hidden: int = 2048
    intermediate: int = 512
    experts: int = 256
    top_k: int = 8
    ranks: int = 8
    dtype: torch.dtype = torch.bfloat16


TINY = Size(tokens=48, hidden=32, intermediate=16, experts=8, top_k=2, ranks=4)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gigabytes", type=float, default=50.0, help="of the link, a second (default: 50)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rank-of", choices=("nccl", "gloo"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.rank_of:
        return between_devices(options)
    record = {"torch": torch.__version__, "machine": platform.machine(), "gigabytes a second": options.gigabytes}
    if options.device == "cuda" and not torch.cuda.is_available():
        return skip(options, record, f"torch {torch.__version__} sees no CUDA device here")
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    record["device"] = torch.cuda.get_device_name() if options.device == "cuda" else "cpu, tiny sizes"
    record["values"] = [*op_errors(device), *layer_errors(device), offload_error(device), *waits(device)]
    wrong = [f"{each['what']}: off by {each['error']:.1e}" for each in record["values"] if not each["right"]]
    if wrong:
        write(options, record)
        print("wrong values; nothing is timed:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    size = Size() if options.device == "cuda" else TINY
    record["size"] = {**asdict(size), "dtype": str(size.dtype)}
    record["timed"] = on_stand_in_wire(options, device, size)
    record["between devices"] = run_ranks(options)
    write(options, record)
    print_table(record)
    return int("error" in record["between devices"])


def skip(options, record, reason):
    write(options, {**record, "skipped": reason})
    print(f"skipped: {reason}")
    return 0


def write(options, record):
    (options.out / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


class Wire:
    """Replaces torch.distributed's collectives: all ranks of the group do the same as this one.

    On a side stream, rows are late by the time that the link would take. The data that arrives is not what was sent.
    """

    def __init__(self, device):
        self.device, self.rate = device, None
        self.streams: Any = accelerator(device)
        self.seconds = 0.0  # how long the link was busy since the last reset
        if self.streams is not None:
            self.side = self.streams.Stream(device)
            self.cycles_a_second = self._calibrate()

    def all_to_all_single(self, received, rows, recv_splits, send_splits, group, async_op):
        over_the_link = max(sum(send_splits[1:]), sum(recv_splits[1:])) * rows.stride(0) * rows.element_size()
        seconds = 0.0 if self.rate is None else over_the_link / self.rate
        self.seconds += seconds
        if self.streams is None:
            self._fill(received, rows)
            return chunk_dist.DONE
        self.side.wait_stream(self.streams.current_stream(self.device))
        with self.streams.stream(self.side):
            if seconds:
                self.streams._sleep(int(seconds * self.cycles_a_second))
            self._fill(received, rows)
            return Copy(self.streams, self.device, self.side.record_event())

    def all_gather(self, gathered, local, group, async_op):
        gathered.view(-1, local.numel()).copy_(local.expand(gathered.numel() // local.numel(), -1))
        return chunk_dist.DONE

    @staticmethod
    def _fill(received, rows):
        n = min(len(received), len(rows))
        received[:n].copy_(rows[:n])
        received[n:].zero_()

    def _calibrate(self, cycles=50_000_000):
        for _ in range(2):  # the first one wakes the clock up
            self.streams.synchronize()
            start = time.perf_counter()
            self.streams._sleep(cycles)
            self.streams.synchronize()
        return cycles / (time.perf_counter() - start)

    @contextlib.contextmanager
    def in_place(self):
        with (
            mock.patch.object(dist, "all_to_all_single", self.all_to_all_single),
            mock.patch.object(dist, chunk_dist._ALL_GATHER, self.all_gather),
            # it would find out that the wrong rows arrive
            mock.patch.object(moe_dispatcher, "check_all_to_all", lambda group, device: None),
        ):
            yield


class Step:
    """One rank's layer, forward and backward."""

    def __init__(self, size, device, group):
        generator = torch.Generator().manual_seed(dist.get_rank(group))
        local = size.experts // dist.get_world_size(group)

        def normal(*shape, scale=1.0):
            values = torch.randn(shape, generator=generator) * scale
            return values.to(device, size.dtype).requires_grad_()

        self.size, self.group = size, group
        self.x = normal(size.tokens, size.hidden)
        self.weight = normal(size.tokens, size.top_k)
        self.fc1 = normal(local, size.hidden, 2 * size.intermediate, scale=size.hidden**-0.5)
        self.fc2 = normal(local, size.intermediate, size.hidden, scale=size.intermediate**-0.5)
        self.grad = normal(size.tokens, size.hidden).detach()
        scores = torch.rand(size.tokens, size.experts, generator=generator)
        self.index = scores.topk(size.top_k).indices.to(device)

    def __call__(self, dispatch):
        out = dispatch(self.size.experts, self.weight, self.index, self.x, self.fc1, self.fc2, self.group)
        return out, *torch.autograd.grad(out, (self.x, self.weight, self.fc1, self.fc2), self.grad)


def cases(numbers=(1, 2, 4, 8)):
    """Settings by name."""
    for schedule in SCHEDULES:
        for n in numbers:
            yield f"{schedule}, N={n}", ChunkMoEConfig(moe_num_chunks=n, chunk_moe_schedule=schedule)
    for keep in KEEPS[1:]:
        for n in numbers[-2:]:
            yield f"rolling, N={n}, keep {keep}", ChunkMoEConfig(moe_num_chunks=n, chunk_moe_keep=keep)


def on_stand_in_wire(options, device, size):
    dist.init_process_group("fake", rank=0, world_size=size.ranks, store=FakeStore())
    wire, timed = Wire(device), []
    step = Step(size, device, dist.group.WORLD)
    with wire.in_place():
        for name, config in cases():
            dispatch = ChunkMoEDispatcher(config)
            wire.rate = None
            free, _ = measure(step, dispatch, device, options.repeats)
            wire.rate, wire.seconds = options.gigabytes * 1e9, 0.0
            seconds, peak = measure(step, dispatch, device, options.repeats)
            on_wire = wire.seconds / (options.repeats + 1)  # one call is not counted
            timed.append(row(name, seconds, free, on_wire, peak))
        trace(options, device, step, ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=4)))
    dist.destroy_process_group()
    return timed


def row(name, seconds, free, on_wire, peak):
    exposed = max(0.0, statistics.median(seconds) - statistics.median(free))
    return {
        "what": name,
        "ms": [1e3 * each for each in seconds],
        "ms without the link": [1e3 * each for each in free],
        "ms on the link": 1e3 * on_wire,
        # on a CPU nothing is late
        "hidden": None if peak is None or not on_wire else max(0.0, 1 - exposed / on_wire),
        "peak MB": None if peak is None else peak / 1e6,
    }


def measure(step, dispatch, device, repeats):
    """Seconds of each repeat after one call that is not counted, and the most bytes in addition to those before."""
    streams, seconds = accelerator(device), []
    synchronize = (lambda: None) if streams is None else streams.synchronize
    step(dispatch)
    synchronize()
    if streams is not None:
        streams.reset_peak_memory_stats(device)
        before = streams.memory_allocated(device)
    for _ in range(repeats):
        start = time.perf_counter()
        step(dispatch)
        synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, None if streams is None else streams.max_memory_allocated(device) - before


def trace(options, device, step, dispatch):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step(dispatch)
        if device.type == "cuda":
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(options.out / "trace.json"))


def run_ranks(options):
    """The layer between this machine's devices, each a process; on CPU two processes over gloo."""
    number = torch.cuda.device_count() if options.device == "cuda" else 2
    if number < 2:
        return {"skipped": "there is one device"}
    backend = "nccl" if options.device == "cuda" else "gloo"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]
    command += [__file__, "--device", options.device, "--out", str(options.out), "--rank-of", backend]
    try:
        done = subprocess.run(
            [*command, "--repeats", str(options.repeats)], timeout=RANK_LIMIT_S, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {RANK_LIMIT_S} s"}
    if done.returncode:
        return {"error": done.stderr[-4000:]}
    return json.loads((options.out / "ranks.json").read_text(encoding="utf-8"))


def between_devices(options):
    rank, number = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{rank}" if options.device == "cuda" else "cpu")
    if options.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(options.rank_of)
    small = replace(TINY, experts=2 * number * TINY.top_k, ranks=number)
    step = Step(small, device, dist.group.WORLD)
    expected, worst = step(AllToAllDispatcher()), 0.0
    for _, config in cases():
        for got, want in zip(step(ChunkMoEDispatcher(config)), expected):
            error = (got.float() - want.float()).abs().max() / want.float().abs().max()
            worst = max(worst, error.nan_to_num(float("inf")).item())
    if worst > 5e-2:
        print(f"values are off the plain dispatcher's by {worst:.1e}", file=sys.stderr)
        return 1
    size = replace(Size(), ranks=number, experts=32 * number) if options.device == "cuda" else small
    step, timed = Step(size, device, dist.group.WORLD), []
    for name, config in cases():
        seconds, peak = measure(step, ChunkMoEDispatcher(config), device, options.repeats)
        timed.append(row(name, seconds, seconds, 0, peak))
    if rank == 0:
        told = {"ranks": number, "back end": options.rank_of, "error of values": worst, "timed": timed}
        (options.out / "ranks.json").write_text(json.dumps(told), encoding="utf-8")
    chunk_dist.destroy()
    return 0


def print_table(record):
    link = record["gigabytes a second"]
    table = Table(title=f"{record['device']}, torch {record['torch']}, stand-in link of {link} GB/s")
    for column in ("what", "error", "ms", "without the link", "on the link", "hidden", "peak MB"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for each in record["values"]:
        table.add_row(each["what"], f"{each['error']:.1e}")
    for each in record["timed"]:
        hidden = "" if each["hidden"] is None else f"{each['hidden']:.0%}"
        table.add_row(each["what"], "", *times(each), f"{each['ms on the link']:.2f}", hidden, megabytes(each))
    ranks = record["between devices"]
    for each in ranks.get("timed", ()):
        name = f"{ranks['ranks']} ranks, {ranks['back end']}: {each['what']}"
        table.add_row(name, "", times(each)[0], "", "", "", megabytes(each))
    Console(width=150).print(table)
    for key in ("skipped", "error"):
        if key in ranks:
            print(f"between devices: {key}: {ranks[key]}")


def times(each):
    return [f"{statistics.median(each[key]):.2f}" for key in ("ms", "ms without the link")]


def megabytes(each):
    return "" if each["peak MB"] is None else f"{each['peak MB']:.0f}"


if __name__ == "__main__":
    sys.exit(main())
