"""What `killed_rank.py` runs on every rank: a trainer, one of whose ranks kills itself at a moment of its second step.

Under torchrun: `python -m soak.killed FOLDER SECONDS MOMENT CULPRIT`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_chunk import observe
from mindspeed_chunk.observe import Event
from soak.trained import CHUNKED, NUM_CHUNKS
from standalone_ranks import trainer

STEPS = 4
LAST = NUM_CHUNKS - 1

# moment: (part of the step, kind and name of the event that it follows; for micro-chunks the index)
MOMENTS = {
    "forward, plan gathered": ("forward", "all_gather", "plan"),
    "forward, first dispatch on the wire": ("forward", "action", "D0"),
    "forward, between two chunks": ("forward", "action", "E1"),
    "forward, last combine on the wire": ("forward", "action", f"C{LAST}"),
    "forward, second micro-chunk": ("forward", "micro_chunk", 1),
    "backward, its start": ("backward", "phase", "backward"),
    "recompute, second dispatch on the wire": ("recompute", "action", "D1"),
    "backward, first gradients on the wire": ("backward", "action", "D0"),
    "backward, weight gradients": ("backward", "action", "W1"),
    "backward, last combine on the wire": ("backward", "action", f"C{LAST}"),
}


class Killer(list):
    """Listens to what the running code tells, and ends the process at a moment."""

    def __init__(self, moment: str, when: Callable[[], bool], last_words: Path) -> None:
        super().__init__()
        self._moment, self._when, self._last_words = MOMENTS[moment], when, last_words
        self._phase, self._in_layer = "", False

    def append(self, event: Event) -> None:
        if event.kind == "phase":
            self._phase = event.name
        elif event.kind == "layer":
            self._in_layer = event.name == "begin"
        part = "recompute" if self._phase == "backward" and self._in_layer else self._phase
        name = event.detail["index"] if event.kind == "micro_chunk" else event.name
        if (part, event.kind, name) == self._moment and self._when():
            self._last_words.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(rank: int, world_size: int, folder: str, moment: str, culprit: int) -> None:
    """The culprit leaves the time of its end, `time.monotonic()`, in a file of the folder, which holds the model."""
    this, step = trainer(*CHUNKED, f"model.model_name_or_path={folder}"), 0
    if rank == culprit:
        # torch.distributed's own context would copy the events; here the listener itself acts
        observe._listeners.append(Killer(moment, lambda: step == 1, Path(folder) / "killed"))
    for step in range(STEPS):
        this.step(step)


def main() -> None:
    folder, seconds, moment, culprit = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(seconds)))
    train_until_killed(dist.get_rank(), dist.get_world_size(), folder, moment, int(culprit))


if __name__ == "__main__":
    main()
