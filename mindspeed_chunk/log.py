"""Lines in the log of a training run: on one rank, and once or rarely."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Collection
from typing import Any

logger = logging.getLogger("mindspeed_chunk")
_said: set[str] = set()


def say(level: int, text: str, ranks: Collection[int] = (0,)) -> None:
    """Log a line on these ranks: of the process group or, before there is one, of the launcher's environment."""
    dist: Any = sys.modules.get("torch.distributed")  # without it there is no group; a log line must not import torch
    in_group = dist is not None and dist.is_available() and dist.is_initialized()
    # compared as text: a wrong variable is the launcher's to report
    if (str(dist.get_rank()) if in_group else os.environ.get("RANK", "0")) in map(str, ranks):
        with contextlib.suppress(Exception):  # a handler may fail, for example if stderr is closed; the step must go on
            logger.log(level, "mindspeed_chunk: %s", text)


def say_once(level: int, text: str, about: str = "") -> None:
    """Log a line on rank 0, unless this process has already logged it, or another line with the same `about`.

    A line that the log's level hides does not count.
    """
    if (about or text) not in _said and logger.isEnabledFor(level):
        _said.add(about or text)
        say(level, text)


class Rarely:
    """Counts how often something has happened, and says when to report it: the first, second, fourth, ... time."""

    times = 0

    def again(self) -> bool:
        self.times += 1
        return self.times & (self.times - 1) == 0
