"""Starts a command of this package once a rank on this machine: one thread each, with or without a limited link."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn

from mindspeed_chunk.tools.link import limited_link

_GRACE_S = 10.0
_POLL_S = 0.05
# in a namespace, torch warns once a connection that an address has no name
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_LAUNCHER = "MINDSPEED_CHUNK_LAUNCHER"  # its process id, for the ranks
_PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """Whether this process was started as one of several ranks: by `launch`, or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def end_with_launcher() -> None:
    """Have Linux end this rank when the process that started it by `launch` is gone, in whatever way."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # gone before it was asked for
            os._exit(1)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port that the system gives to nobody who asks for any, while a rank can still listen on it by its number.

    A port that was only looked up may be another process's before the first rank listens; the others then wait there.
    Linux lets two sockets have one port if both set SO_REUSEADDR, as torch's store does, and no more than one listens.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def launch(
    module: str, arguments: Sequence[str], ranks: int, rate: str | None, environment: Mapping[str, str] | None = None
) -> int:
    """Run `python -m module *arguments` on every rank and wait for all of them.

    When a rank fails, the others get some seconds to end by themselves; then they are ended. So are all when this
    process is told to end; when it is killed, those of a module that calls `end_with_launcher` end, too.

    Args:
        rate: of the link between the ranks, or None for this machine's own.
        environment: additions to every rank's environment.

    Returns:
        0, or the exit code of the rank that failed first.

    Raises:
        LinkError: where the link cannot be had.
    """
    places: AbstractContextManager[list[tuple[list[str], dict[str, str]]]]
    places = limited_link(rate, ranks) if rate else nullcontext([([], {})] * ranks)
    with _told_to_end(), places as found, reserved_port() as port:
        processes = _start(module, arguments, found, {"MASTER_PORT": str(port), **(environment or {})})
        try:
            return _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()


@contextmanager
def _told_to_end() -> Iterator[None]:
    """A request to end leaves the block by an exception, as Ctrl-C does, and so takes down what it has set up."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for each, handler in before.items():
        if handler != signal.SIG_IGN:  # under nohup the run goes on
            signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _start(
    module: str,
    arguments: Sequence[str],
    places: list[tuple[list[str], dict[str, str]]],
    environment: Mapping[str, str],
) -> list[subprocess.Popen]:
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(len(places)),
        "OMP_NUM_THREADS": "1",
        _LAUNCHER: str(os.getpid()),
        **environment,
    }
    processes = []
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which ranks inherit: Ctrl-C is this process's to answer
    try:
        for rank, (prefix, extra) in enumerate(places):
            command = [*prefix, sys.executable, "-m", module, *arguments]
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env={**_QUIET, **os.environ, **shared, **own, **extra}))
    finally:
        signal.signal(signal.SIGINT, answer)
    return processes


def _wait(processes: list[subprocess.Popen]) -> int:
    code, deadline = 0, float("inf")
    while True:
        codes = [process.poll() for process in processes]
        if not code:
            code = next((abs(each) for each in codes if each), 0)
            if code:
                deadline = time.monotonic() + _GRACE_S
        if None not in codes or time.monotonic() > deadline:
            return code
        time.sleep(_POLL_S)
