"""FSDP2's parameter gathers and gradient reduce-scatters in a step of the tiny example, one global batch three ways.

    torchrun --nproc_per_node 4 benchmarks/mbs_traffic.py

Four ranks, expert-parallel size 2: an expert's own unit spans the 2 ranks that hold it, every other unit all 4. Counted
on rank 0. Exits with 1 where ChunkMBS takes more than one gather a direction and one reduce-scatter a unit. (On torch
2.7 a recompute that is not cut gathers the experts once more.)
"""

import argparse
import sys

import torch
import torch.distributed as dist

import example
from mindspeed_chunk.dist import destroy
from mindspeed_chunk.tools.measure import GATHER, REDUCE_SCATTER, Collectives

NAMES = {2: "experts", 4: "all others"}
# four layers' experts; four layers, the embedding, the head and the rest
EXPECTED = {(GATHER, 2): 8, (REDUCE_SCATTER, 2): 4, (GATHER, 4): 14, (REDUCE_SCATTER, 4): 7}


RUNS = {
    "one batch of 4": example.batch(4),
    "accumulation 4": example.batch(1, 4),
    "ChunkMBS, 4 micro-chunks": example.batch(4) + example.CHUNK_MBS,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dispatchers", nargs="+", default=("alltoall", "chunkmoe"), help="default: both")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    counted = {}
    for dispatcher in options.dispatchers:
        for name, overrides in RUNS.items():
            counted[dispatcher, name] = count((f"parallel.ep_plan.dispatcher={dispatcher}", *overrides))
    broken = []
    if dist.get_rank() == 0:
        report(counted)
        for (dispatcher, name), seen in counted.items():
            if name.startswith("ChunkMBS") and seen.calls != EXPECTED:
                broken.append(f"{dispatcher}, {name}: other than one gather a direction and one reduce-scatter a unit")
        print("\n".join(broken), file=sys.stderr)
    destroy()
    return 1 if broken else 0


def count(overrides):
    trainer = example.trainer(*overrides)
    trainer.step(0)  # what happens only once is behind it
    with Collectives() as collectives:
        trainer.step(1)
    return collectives


def report(counted):
    keys = [(kind, ranks) for ranks in NAMES for kind in (GATHER, REDUCE_SCATTER)]
    rows = [
        (f"{dispatcher}, {name}", *(f"{seen.calls[key]} ({seen.nbytes[key] / 1e6:.2f})" for key in keys))
        for (dispatcher, name), seen in counted.items()
    ]
    columns = ("run", *(f"{NAMES[ranks]}: {kind}" for kind, ranks in keys))
    example.show("one step, by the unit's ranks: calls (MB)", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
