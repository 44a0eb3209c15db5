"""The output of a run: log lines in MindSpeed-MM's format, a progress bar on a terminal, metrics as JSON lines."""

import json
import sys
from collections import Counter
from datetime import datetime
from types import SimpleNamespace
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mindspeed_chunk.observe import Event

Traffic = dict[str, dict[str, float]]  # counts by phase and kind
TRAFFIC = ("all_to_all", "all_gather", "all_reduce", "host_copy")


class RunLog:
    """Rank 0's view of the run; on other ranks every call does nothing."""

    def __init__(self, training: SimpleNamespace, global_batch_size: int, metrics: TextIO | None, rank: int) -> None:
        """metrics: for JSON lines; this object closes it at the end."""
        self._training, self._global_batch_size = training, global_batch_size
        self._metrics, self._quiet = metrics, rank != 0
        columns = (TextColumn("loss {task.fields[loss]:.4f}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, disable=self._quiet or not sys.stdout.isatty())
        self._task = self._progress.add_task("train", total=training.train_iters, loss=float("nan"))

    def __enter__(self) -> "RunLog":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        if self._metrics:
            self._metrics.close()

    def iteration(
        self, iteration: int, losses: dict[str, float], grad_norm: float, elapsed_ms: float, per_layer: Traffic | None
    ) -> None:
        """losses: by name, "loss" first. per_layer: traffic counts, or None if nothing was counted."""
        if self._quiet:
            return
        self._progress.update(self._task, completed=iteration, loss=losses["loss"])
        if iteration % self._training.log_interval == 0:
            print(self._line(iteration, losses, grad_norm, elapsed_ms), flush=True)
        if self._metrics:
            record = {"iteration": iteration, **losses, "grad_norm": grad_norm, "elapsed_ms": elapsed_ms}
            traffic = {} if per_layer is None else {"per_layer": per_layer}
            self._metrics.write(json.dumps(record | traffic) + "\n")
            self._metrics.flush()

    def _line(self, iteration: int, losses: dict[str, float], grad_norm: float, elapsed_ms: float) -> str:
        training = self._training
        fields = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration:8d}/{training.train_iters:8d}",
            f"consumed samples: {iteration * self._global_batch_size:12d}",
            f"elapsed time per iteration (ms): {elapsed_ms:.1f}",
            f"learning rate: {training.lr:.6E}",
            f"global batch size: {self._global_batch_size:5d}",
            *(f"{name.replace('_', ' ')}: {value:.6E}" for name, value in losses.items()),
            f"grad norm: {grad_norm:.3f}",
        ]
        return " | ".join(fields) + " |"


def traffic_per_layer(events: list[Event], num_calls: int) -> Traffic:
    """Collectives and host copies of one training step, per MoE layer and micro batch.

    events: the events that `observe` collected. The trainer marks "phase" forward and backward, the experts' forward
        marks "layer" begin and end; a layer that runs in the backward is a recompute.
    num_calls: MoE layers times micro batches.
    Returns {"forward": {kind: count}, "recompute": {...}, "backward": {...}} with the kinds that occurred.
    """
    counts: dict[str, Counter[str]] = {"forward": Counter(), "recompute": Counter(), "backward": Counter()}
    phase, in_layer = "forward", False
    for event in events:
        if event.kind == "phase":
            phase = event.name
        elif event.kind == "layer":
            in_layer = event.name == "begin"
        elif event.kind in TRAFFIC:
            counts["recompute" if phase == "backward" and in_layer else phase][event.kind] += 1
    return {phase: {kind: count / num_calls for kind, count in kinds.items()} for phase, kinds in counts.items()}
