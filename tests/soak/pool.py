"""Ranks that stay: each is asked one question after the other by the process that started them."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from launcher import HANG_S, RanksFailed, run_ranks

GRACE_S = 2.0
FOREVER_S = 10**6


class Broken(Exception):
    """A rank raised, died or hung; the text has every rank's report. The ranks have ended."""


class Pool:
    """`ranks` ranks that answer questions with `function(rank, ranks, question)`, of a module that they can import.

    limit: seconds a collective may take. After three times that a question without an answer is a hang.
    """

    def __init__(self, function: Callable, ranks: int, limit: float) -> None:
        self._function, self._ranks, self._limit = function, ranks, limit
        self._lines: dict[Connection, int] = {}
        self._pids: list[int] = []
        self._outcomes: list = []
        self._thread: threading.Thread | None = None

    def ask(self, question: object) -> list:
        """Every rank's answer, in the order of the ranks. Raises Broken; the next question then starts new ranks."""
        if self._thread is None:
            self._start()
        answers = {}
        try:
            for line in self._lines:
                line.send(question)
            deadline = time.monotonic() + 3 * self._limit
            while len(answers) < self._ranks:
                waiting = [line for line in self._lines if self._lines[line] not in answers]
                ready = wait(waiting, max(0.0, deadline - time.monotonic()))
                if not ready:
                    os.kill(self._pids[0], signal.SIGKILL)  # the launcher then dumps the stacks of the others
                    break
                answers |= {self._lines[line]: line.recv() for line in ready}
        except (EOFError, OSError):
            pass
        if len(answers) < self._ranks:
            raise Broken(self.close())
        return [answers[rank] for rank in range(self._ranks)]

    def close(self) -> str:
        """End the ranks. Returns the report of those that failed, or ""."""
        for line in self._lines:
            line.close()
        self._lines = {}
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return "" if all(outcome.ok for outcome in self._outcomes) else str(RanksFailed(self._outcomes))

    def _start(self) -> None:
        with tempfile.TemporaryDirectory(prefix="pool-") as folder, socket.socket(socket.AF_UNIX) as door:
            address = str(Path(folder) / "door")
            door.bind(address)
            door.listen(self._ranks)
            door.settimeout(HANG_S)
            self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
            self._thread.start()
            pids = {}
            for _ in range(self._ranks):
                line = Connection(door.accept()[0].detach())
                rank, pids[rank] = line.recv()
                self._lines[line] = rank
            self._pids = [pids[rank] for rank in range(self._ranks)]

    def _run(self, address: str) -> None:
        self._outcomes = run_ranks(
            answer,
            self._ranks,
            address,
            self._function,
            timeout=FOREVER_S,
            collective_timeout=self._limit,
            grace=GRACE_S,
            expect_failure=True,
        )


def answer(rank: int, ranks: int, address: str, function: Callable) -> None:
    """The life of a rank: until nobody asks any more."""
    door = socket.socket(socket.AF_UNIX)
    door.connect(address)
    with Connection(door.detach()) as line:
        line.send((rank, os.getpid()))
        while True:
            try:
                question = line.recv()
            except (EOFError, ConnectionResetError):
                return
            line.send(function(rank, ranks, question))
