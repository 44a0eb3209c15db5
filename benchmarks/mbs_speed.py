"""Step time of ChunkMBS compared with gradient accumulation, with the same global batch, interleaved in one run.

    python benchmarks/mbs_speed.py --link 1gbit

Two ranks, one core each, over gloo; with --link in two network namespaces. The tiny example, expert parallelism off, so
that FSDP2 shards everything over the two ranks. Losses and gradient norms are compared before any time is printed.
Next to the measured ratio is the expected one: the step without the time of the saved gathers' bytes on the link.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mindspeed_chunk.dist import destroy
from mindspeed_chunk.standalone.config import load_config
from mindspeed_chunk.standalone.prepare import prepare
from mindspeed_chunk.standalone.train import Trainer
from mindspeed_chunk.tools.link import LinkError
from mindspeed_chunk.tools.measure import GATHER, Collectives
from mindspeed_chunk.tools.ranks import is_rank, launch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "qwen3_5_35b"
RANKS = 2
BOUND = 1e-5
ON = ("features.enable_chunk_mbs=true", "features.enable_activation_offload=true")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", metavar="RATE", help="limit the link between the ranks, such as 1gbit; needs root")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    if is_rank():
        return measure(options)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    try:
        return launch(Path(__file__).stem, sys.argv[1:], RANKS, options.link, {"PYTHONPATH": path})
    except LinkError as error:
        print(error, file=sys.stderr)
        return 1


def measure(options):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    number = options.micro_batches
    trainers = {
        f"accumulation {number}": trainer(options, 1, number),
        f"ChunkMBS, {number} micro-chunks": trainer(options, number, 1, ON),
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
        print(f"loss or gradient norm differ by {apart:.1e}; no times printed", file=sys.stderr)
        return 1
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for step in range(2, 2 + options.repeats):
        for name in sorted(trainers, reverse=step % 2 == 1):
            times[name].append(timed(trainers[name], step))
    if dist.get_rank() == 0:
        report(options, times, gathered, apart)
    destroy()
    return 0


def trainer(options, size, accumulation, extra=()):
    settings = (
        f"model.model_name_or_path={EXAMPLE / 'tiny'}",
        "parallel.expert_parallel_size=1",
        f"data.dataset_param.basic_parameters.cutoff_len={options.sequence}",
        f"training.micro_batch_size={size}",
        f"training.gradient_accumulation_steps={accumulation}",
        "features.loss_cfg.router_aux_loss_coef=0",
    )
    config, _ = load_config(EXAMPLE / "tiny.yaml", [*settings, *extra], RANKS)
    return Trainer(prepare(config))


def timed(one, step):
    """Seconds of the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    one.step(step)
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def report(options, times, gathered, apart):
    first, second = times
    table = Table(title=f"one step, link {options.link or 'not limited'}; results apart by {apart:.0e}")
    for column in ("run", "median ms", "quartiles ms", "gathered MB"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, seconds in times.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        table.add_row(name, f"{middle:.0f}", f"{low:.0f} - {high:.0f}", f"{gathered[name] / 1e6:.1f}")
    Console().print(table)
    ratios = [own / base for own, base in zip(times[second], times[first], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"ratio of the steps: {middle:.3f} (quartiles {low:.3f} - {high:.3f})")
    if options.link and options.link.endswith("gbit"):
        on_link = (gathered[first] - gathered[second]) * (RANKS - 1) / RANKS  # a rank's own shard is there already
        saved = on_link * 8 / (float(options.link.removesuffix("gbit")) * 1e9)
        allowed = 1 - saved / statistics.median(times[first])
        print(f"what the saved gathers allow: {allowed:.3f} ({on_link / 1e6:.1f} MB, {1e3 * saved:.0f} ms on the link)")


if __name__ == "__main__":
    sys.exit(main())
