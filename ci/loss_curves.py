"""Loss curves of the tiny example: Chunk MoE against the plain all-to-all, one factor changed at a time.

    torchrun --nproc_per_node 2 ci/loss_curves.py
    torchrun --nproc_per_node 4 ci/loss_curves.py

On 4 ranks the two ranks that hold the same experts shard them by FSDP. Each run is compared with the plain all-to-all
under the same other settings. Exits with 1 where a bound is broken:

* fp32: within 1e-5 relative at each of the first 10 steps;
* bf16: no further from the plain all-to-all in bf16 than that is from itself in fp32, at the worst of the first 10
  steps: the two round alike, not equally;
* the loss falls by more than 1.0, and a run with the same seed repeats bit for bit.
"""

import argparse
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

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "qwen3_5_35b"
FIRST = 10
BOUND_FP32 = 1e-5
FALL = 1.0

NO_RECOMPUTE = ("features.recompute=false",)
ACCUMULATION = ("training.gradient_accumulation_steps=2", "training.micro_batch_size=2")
BF16 = ("parallel.fsdp_plan.param_dtype=bf16",)


def chunkmoe(chunks=4, **keys):
    settings = {"dispatcher": "chunkmoe", "moe_num_chunks": chunks, **keys}
    return tuple(f"parallel.ep_plan.{key}={value}" for key, value in settings.items())


PLAIN = ("parallel.ep_plan.dispatcher=alltoall", "parallel.ep_plan.moe_num_chunks=0")
# name: (settings of the run, name of the run it is compared with)
RUNS = {
    "alltoall": (PLAIN, None),
    "alltoall, no block recompute": (PLAIN + NO_RECOMPUTE, None),
    "alltoall, accumulation 2": (PLAIN + ACCUMULATION, None),
    "alltoall, bf16": (PLAIN + BF16, None),
    "N=4 rolling": (chunkmoe(), "alltoall"),
    "N=4 rolling, again": (chunkmoe(), "alltoall"),
    "N=1": (chunkmoe(1), "alltoall"),
    "N=2": (chunkmoe(2), "alltoall"),
    "N=3": (chunkmoe(3), "alltoall"),
    "N=8": (chunkmoe(8), "alltoall"),
    "chunk size 100": (chunkmoe(0, moe_chunk_size=100), "alltoall"),
    "pair": (chunkmoe(chunk_moe_schedule="pair"), "alltoall"),
    "recompute of experts": (chunkmoe(chunk_moe_recompute="true"), "alltoall"),
    "no block recompute": (chunkmoe() + NO_RECOMPUTE, "alltoall, no block recompute"),
    "accumulation 2": (chunkmoe() + ACCUMULATION, "alltoall, accumulation 2"),
    "bf16": (chunkmoe() + BF16, "alltoall, bf16"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    curves = {}
    for name, (overrides, _) in RUNS.items():
        start = time.perf_counter()
        curves[name] = curve(overrides, steps)
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - start
            print(f"{name}: {curves[name][0]:.4f} -> {curves[name][-1]:.4f}, {seconds:.0f} s", flush=True)
    world_size = dist.get_world_size()
    failed = dist.get_rank() == 0 and report(curves, steps, world_size)
    destroy()
    return int(failed)


def curve(overrides, steps):
    config, _ = load_config(
        str(EXAMPLE / "tiny.yaml"), [f"model.model_name_or_path={EXAMPLE / 'tiny'}", *overrides], dist.get_world_size()
    )
    trainer = Trainer(prepare(config))
    return [trainer.step(iteration)[0]["loss"] for iteration in range(steps)]


def distance(losses, base, steps):
    """The largest relative difference over the first `steps`."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses[:steps], base[:steps], strict=True))


def report(curves, steps, world_size):
    """Print the table; return whether a bound is broken."""
    bound_bf16 = distance(curves["alltoall, bf16"], curves["alltoall"], FIRST)
    table = Table(title=f"{steps} steps on {world_size} ranks, EP=2; bf16 bound {bound_bf16:.1e}")
    for heading in ("run", "first loss", "last loss", f"difference, {FIRST} steps", f"difference, {steps} steps", ""):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    failed = False
    for name, losses in curves.items():
        base = curves.get(RUNS[name][1])
        verdict = "ok" if losses[0] - losses[-1] > FALL else f"fell by less than {FALL}"
        near = far = "-"
        if base is not None:
            first = distance(losses, base, FIRST)
            near, far = f"{first:.1e}", f"{distance(losses, base, steps):.1e}"
            bound = bound_bf16 if "bf16" in name else BOUND_FP32
            verdict = verdict if first <= bound else f"over {bound:.1e}"
        if name.endswith("again") and losses != curves["N=4 rolling"]:
            verdict = "not bit-equal"
        failed |= verdict != "ok"
        table.add_row(name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", near, far, verdict)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return failed


if __name__ == "__main__":
    sys.exit(main())
