"""Finds what a run of processes holds, and what is left of it afterwards: processes, ports, shared memory."""

from __future__ import annotations

import os
import re
import threading
import uuid
from pathlib import Path

from zygote import alive

PROC = Path("/proc")
POLL_S = 0.2
LISTEN = "0A"
SHARED = "/dev/shm/"


class Watched:
    """Watches every process whose environment has a mark, while this context is open: whoever its parent is by then.

    Attributes:
        environment: the mark, for the processes to be started with.
        pids: of all processes that were seen.
    """

    def __init__(self) -> None:
        self.environment = {"SOAK_RUN": uuid.uuid4().hex}
        self.pids: set[int] = set()
        self._sockets: set[str] = set()
        self._shared: set[str] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def running(self) -> list[int]:
        mark = "=".join(*self.environment.items()).encode()
        return [int(path.name) for path in PROC.glob("[0-9]*") if mark in _environment(path) and alive(path.name)]

    def left(self) -> list[str]:
        """What is still there, in words."""
        told = [f"process {pid}" for pid in self.running()]
        for table in ("tcp", "tcp6"):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == LISTEN and columns[9] in self._sockets:
                    told.append(f"port {int(columns[1].rpartition(':')[2], 16)}")
        told += [f"shared memory {path}" for path in sorted(self._shared) if os.path.exists(path)]
        for line in (PROC / "sysvipc" / "shm").read_text().splitlines()[1:]:
            if int(line.split()[4]) in self.pids:
                told.append(f"shared memory segment {line.split()[1]}")
        return told

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            for pid in self.running():
                self.pids.add(pid)
                self._look(PROC / str(pid))

    def _look(self, process: Path) -> None:
        try:
            targets = [os.readlink(link) for link in (process / "fd").iterdir()]
            mapped = (process / "maps").read_text()
        except OSError:  # it has just ended
            return
        self._sockets |= {target[8:-1] for target in targets if target.startswith("socket:[")}
        self._shared |= {target for target in targets if target.startswith(SHARED)}
        self._shared |= set(re.findall(rf"{SHARED}\S+", mapped))


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # somebody else's, or gone
        return b""
