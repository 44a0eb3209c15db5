"""Step time of ChunkMBS compared with gradient accumulation, with the same global batch, interleaved in one run.

    python benchmarks/mbs_speed.py --link 1gbit

Two ranks, one core each, over gloo; with --link in two network namespaces. The tiny example, expert parallelism off, so
that FSDP2 shards everything over the two ranks. Losses and gradient norms are compared before any time is printed.
Next to the measured ratio is the expected one: the step without the time of the saved gathers' bytes on the link.
"""

import functools
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import example
from mindspeed_chunk.tools.bench_layer import NoResult, seconds_of
from mindspeed_chunk.tools.layer_command import run_on_ranks
from mindspeed_chunk.tools.link import bits_per_second
from mindspeed_chunk.tools.measure import GATHER, Collectives
from mindspeed_chunk.tools.parser import Parser

BOUND = 1e-5


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--link", metavar="RATE", help="limit the link between the ranks, such as 1gbit; needs root")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step (default: 4)")
    parser.add_argument("--sequence", type=int, default=64, help="tokens per sample (default: 64)")
    parser.add_argument("--repeats", type=int, default=11, help="interleaved rounds (default: 11)")
    parser.set_defaults(device="cpu", ranks=2, stand_in=False)
    return run_on_ranks(parser, Path(__file__).stem, environment, measure)


def environment(options):
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}


def measure(options):
    number = options.micro_batches
    common = (*example.sequence(options.sequence), *example.LINEAR, "parallel.expert_parallel_size=1")
    trainers = {
        f"accumulation {number}": example.trainer(*common, *example.batch(1, number)),
        f"ChunkMBS, {number} micro-chunks": example.trainer(*common, *example.batch(number), *example.CHUNK_MBS),
    }
    results, gathered = {}, {}
    for name, one in trainers.items():
        one.step(0)
        with Collectives() as collectives:
            results[name] = one.step(1)
        gathered[name] = sum(n for (kind, _), n in collectives.nbytes.items() if kind == GATHER)
    (losses, norm), (losses_cut, norm_cut) = results.values()
    apart = max(abs(losses["loss"] - losses_cut["loss"]) / losses["loss"], abs(norm - norm_cut) / norm)
    if apart > BOUND:
        raise NoResult(f"loss or gradient norm differ by {apart:.1e}; no times are shown")
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for step in range(2, 2 + options.repeats):
        for name in sorted(trainers, reverse=step % 2 == 1):
            times[name].append(seconds_of(functools.partial(trainers[name].step, step), torch.device("cpu")))
    if dist.get_rank() == 0:
        report(options, times, gathered, apart)


def report(options, times, gathered, apart):
    first, second = times
    rows = []
    for name, seconds in times.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        rows.append((name, f"{middle:.0f}", f"{low:.0f} - {high:.0f}", f"{gathered[name] / 1e6:.1f}"))
    title = f"one step, link {options.link or 'not limited'}; results apart by {apart:.0e}"
    example.show(title, ("run", "median ms", "quartiles ms", "gathered MB"), rows)
    ratios = [own / base for own, base in zip(times[second], times[first], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"ratio of the steps: {middle:.3f} (quartiles {low:.3f} - {high:.3f})")
    if options.link:
        on_link = (gathered[first] - gathered[second]) / options.ranks  # a rank's own shard is there already
        saved = on_link * 8 / bits_per_second(options.link)
        allowed = 1 - saved / statistics.median(times[first])
        print(f"what the saved gathers allow: {allowed:.3f} ({on_link / 1e6:.1f} MB, {1e3 * saved:.0f} ms on the link)")


if __name__ == "__main__":
    sys.exit(main())
