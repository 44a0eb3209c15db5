"""Activations of the tiny example's blocks: batch 1 against batch 8, with ChunkMBS and what belongs to it, and without.

    torchrun --nproc_per_node 2 benchmarks/mbs_memory.py --plot outputs/mbs_memory.png

Bytes alive from the entry of the first block to the exit of the last, forward and backward, at their highest; host
buffers and what FSDP2 keeps are not counted. Growth is in units of the hidden states of 7 samples, [7, S, H]. Exits
with 1 where it is more than 4 with ChunkMBS, recompute and offload: a block's input, output, and their gradients.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import example
from mindspeed_chunk.dist import destroy
from mindspeed_chunk.tools.measure import LiveBytes

SMALL, LARGE = 1, 8
BOUND = 4.0


def features(chunk_mbs=True, recompute=True, offload=True):
    on = {"enable_chunk_mbs": chunk_mbs, "recompute": recompute, "enable_activation_offload": offload}
    return tuple(f"features.{key}={str(value).lower()}" for key, value in on.items())


RUNS = {
    "ChunkMBS, recompute, offload": features(),
    "without offload": features(offload=False),
    "without recompute": features(recompute=False),
    "without both": features(recompute=False, offload=False),
    "without ChunkMBS": features(chunk_mbs=False),
    "without all three": features(False, False, False),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dispatcher", default="chunkmoe", help="default: chunkmoe")
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sample (default: 512)")
    parser.add_argument("--first", type=int, default=len(RUNS), metavar="N", help="only the first N runs")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="where to draw memory over time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = {}
    for name, overrides in list(RUNS.items())[: options.first]:
        for size in (SMALL, LARGE):
            seen[name, size] = Blocks(options, size, overrides).measure()
    worst = 0.0
    if dist.get_rank() == 0:
        unit = (LARGE - SMALL) * options.sequence * seen[next(iter(RUNS)), SMALL].hidden * 4
        worst = report(seen, unit)
        if options.plot:
            plot(seen, options.plot)
            print(f"bytes over the step: {options.plot}")
    destroy()
    return 0 if worst <= BOUND else 1


class Blocks:
    """One training step, watched between the first block and the last."""

    def __init__(self, options, size, overrides):
        dispatcher = f"parallel.ep_plan.dispatcher={options.dispatcher}"
        settings = (dispatcher, *example.sequence(options.sequence), *example.batch(size), *example.LINEAR)
        self.trainer = example.trainer(*settings, *overrides)
        self.hidden = self.trainer.model.config.text_config.hidden_size
        self.watch: LiveBytes
        self.spans: list[tuple[float, float, int]] = []

    def measure(self):
        self.trainer.step(0)  # host buffers, optimizer state: there before it counts
        layers = self.trainer.model.model.language_model.layers
        layers[0].register_forward_pre_hook(self._enter, prepend=True)
        layers[-1].register_forward_hook(self._leave)
        with LiveBytes() as self.watch:
            self.start = time.perf_counter()
            self.trainer.backward(1)
            self.end = time.perf_counter()
        self.peak = max(peak for _, _, peak in self.spans)
        del self.trainer
        return self

    def _enter(self, block, args):
        args[0].register_hook(lambda grad: self._close())
        self._open()

    def _leave(self, block, args, output):
        self._close()
        output.register_hook(lambda grad: self._open())

    def _open(self):
        self.opened, self.watch.peak = time.perf_counter(), self.watch.now

    def _close(self):
        self.spans.append((self.opened, time.perf_counter(), self.watch.peak))


def report(seen, unit):
    """Print the table; return the growth of the first run."""
    growths, rows = [], []
    for name in dict.fromkeys(name for name, _ in seen):
        small, large = seen[name, SMALL].peak, seen[name, LARGE].peak
        growths.append((large - small) / unit)
        rows.append((name, *(f"{value / 1e3:.0f}" for value in (small, large, large - small)), f"{growths[-1]:.2f}"))
    title = f"highest bytes alive in the blocks (kB); unit: {unit / 1e3:.0f} kB"
    example.show(title, ("run", f"batch {SMALL}", f"batch {LARGE}", "growth", "in units"), rows)
    return growths[0]


def plot(seen, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name in dict.fromkeys(name for name, _ in seen):
        run = seen[name, LARGE]
        times = [(moment - run.start) / (run.end - run.start) for moment, _ in run.watch.curve]
        axes.plot(times, [nbytes / 1e6 for _, nbytes in run.watch.curve], label=name, linewidth=1)
    axes.set(xlim=(0, 1), xlabel="time in the step, forward then backward", ylabel=f"MB alive, batch {LARGE}")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
