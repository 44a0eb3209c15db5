"""Loss curves of the tiny example: Chunk MoE and ChunkMBS compared with the plain all-to-all, one change at a time.

    torchrun --nproc_per_node 2 benchmarks/loss_curves.py
    torchrun --nproc_per_node 4 benchmarks/loss_curves.py
    torchrun --nproc_per_node 2 benchmarks/loss_curves.py --steps 20 --only balance --only ChunkMBS

On 4 ranks the two ranks with the same experts shard them by FSDP. Each run is compared with the plain all-to-all with
the same other settings. Exits with 1 if a limit is exceeded:

* fp32: within 1e-5 relative at each of the first 10 steps;
* bf16: the largest difference of the first 10 steps from the plain all-to-all in bf16 is at most the difference of the
  plain all-to-all between bf16 and fp32: the two round in a similar, but not in the same way;
* the loss falls by more than 1.0, and a run with the same seed repeats bit for bit.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist

import example
from example import CHUNK_MBS, LINEAR
from mindspeed_chunk.dist import destroy

FIRST = 10
BOUND_FP32 = 1e-5
FALL = 1.0

NO_RECOMPUTE = ("features.recompute=false",)
ACCUMULATION, ACCUMULATION_4 = example.batch(2, 2), example.batch(1, 4)
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
    "N=4 rolling, again": (chunkmoe(), "N=4 rolling"),
    "N=1": (chunkmoe(1), "alltoall"),
    "N=2": (chunkmoe(2), "alltoall"),
    "N=3": (chunkmoe(3), "alltoall"),
    "N=8": (chunkmoe(8), "alltoall"),
    "chunk size 100": (chunkmoe(0, moe_chunk_size=100), "alltoall"),
    "pair": (chunkmoe(chunk_moe_schedule="pair"), "alltoall"),
    "recompute of experts": (chunkmoe(chunk_moe_recompute="true"), "alltoall"),
    "input kept alone": (chunkmoe(chunk_moe_keep="input"), "alltoall"),
    "shared expert overlapped": (chunkmoe(chunk_moe_overlap_shared_expert="true"), "alltoall"),
    "number of chunks chosen": (chunkmoe(0, chunk_moe_auto="true"), "alltoall"),
    "two chunks ahead": (chunkmoe(chunk_moe_lookahead=2), "alltoall"),
    "unread output of recomputes skipped": (chunkmoe(chunk_moe_skip_unread="true"), "alltoall"),
    "alltoall, no balance": (PLAIN + LINEAR, None),
    "alltoall, accumulation 4, no balance": (PLAIN + LINEAR + ACCUMULATION_4, "alltoall, no balance"),
    "alltoall, ChunkMBS, no balance": (PLAIN + LINEAR + CHUNK_MBS, "alltoall, no balance"),
    "N=4, accumulation 4, no balance": (chunkmoe() + LINEAR + ACCUMULATION_4, "alltoall, no balance"),
    "N=4, ChunkMBS, no balance": (chunkmoe() + LINEAR + CHUNK_MBS, "alltoall, no balance"),
    "alltoall, ChunkMBS": (PLAIN + CHUNK_MBS, "alltoall"),
    "N=4, ChunkMBS": (chunkmoe() + CHUNK_MBS, "alltoall"),
    "no block recompute": (chunkmoe() + NO_RECOMPUTE, "alltoall, no block recompute"),
    "accumulation 2": (chunkmoe() + ACCUMULATION, "alltoall, accumulation 2"),
    "bf16": (chunkmoe() + BF16, "alltoall, bf16"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each run (default: 60)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="runs with TEXT in their name, and their bases")
    parser.add_argument("--set", action="append", default=[], metavar="key.path=value", help="for every run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    curves = {}
    for name in chosen(options.only):
        start = time.perf_counter()
        curves[name] = curve((*RUNS[name][0], *options.set), options.steps)
        if dist.get_rank() == 0:
            (first, _), (last, _) = curves[name][0], curves[name][-1]
            print(f"{name}: {first:.4f} -> {last:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    world_size = dist.get_world_size()
    failed = dist.get_rank() == 0 and report(curves, options.steps, world_size)
    destroy()
    return int(failed)


def chosen(only):
    """Names of runs, a base before what is compared with it."""
    names = [name for name in RUNS if not only or any(text in name for text in only)]
    needed = {*names, *(RUNS[name][1] for name in names)}
    if any("bf16" in name for name in names):
        needed |= {"alltoall", "alltoall, bf16"}
    return [name for name in RUNS if name in needed]


def curve(overrides, steps):
    """(loss, norm of the gradients) of each step."""
    return [(losses["loss"], norm) for losses, norm in map(example.trainer(*overrides).step, range(steps))]


def distance(curve, base, steps):
    """The largest relative difference over the first `steps`, of losses and of gradient norms."""
    pairs = list(zip(curve[:steps], base[:steps], strict=True))
    return tuple(max(abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs) for i in (0, 1))


def report(curves, steps, world_size):
    """Print the table; return whether a bound is broken."""
    title = f"{steps} steps on {world_size} ranks, EP=2"
    bound_bf16 = None
    if "alltoall, bf16" in curves:
        bound_bf16, _ = distance(curves["alltoall, bf16"], curves["alltoall"], FIRST)
        title += f"; bf16 bound {bound_bf16:.1e}"
    headings = ("run", "first loss", "last loss", f"difference, {FIRST} steps", "its gradient norm")
    rows, failed = [], False
    for name, curve_ in curves.items():
        base, (first, _), (last, _) = curves.get(RUNS[name][1]), curve_[0], curve_[-1]
        verdict = "ok" if first - last > FALL else f"fell by less than {FALL}"
        near = norm = far = "-"
        if base is not None:
            (off, off_norm), (late, _) = distance(curve_, base, FIRST), distance(curve_, base, steps)
            near, norm, far = f"{off:.1e}", f"{off_norm:.1e}", f"{late:.1e}"
            bound = bound_bf16 if "bf16" in name else BOUND_FP32
            verdict = verdict if off <= bound else f"over {bound:.1e}"
        if name.endswith("again") and curve_ != curves["N=4 rolling"]:
            verdict = "not bit-equal"
        failed |= verdict != "ok"
        rows.append((name, f"{first:.6f}", f"{last:.6f}", near, norm, far, verdict))
    example.show(title, (*headings, f"difference, {steps} steps", ""), rows)
    return failed


if __name__ == "__main__":
    sys.exit(main())
