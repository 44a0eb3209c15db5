"""Starts a command of this package on several ranks of this machine: one thread each, with or without a limited link.

    python -m mindspeed_chunk.tools.ranks LAUNCHER MODULE [ARGUMENT...]

is how `launch` starts a rank: `python -m MODULE ARGUMENT...`, which ends with the process LAUNCHER.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mindspeed_chunk.tools.link import limited_link

_GRACE_S = 10.0
_POLL_S = 0.05
# in a namespace, torch warns for each connection that an address has no name
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """Whether this process was started as one of several ranks: by `launch`, or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def end_with(parent: int) -> None:
    """Make Linux end this process when its parent ends, in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port that the system gives to no other process that requests a free one, but on which a rank can listen.

    If a port is only looked up, another process may get it before the first rank listens; the other ranks then wait
    there. On Linux two sockets can have the same port if both set SO_REUSEADDR, as torch's store does, and at most one
    listens.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def launch(
    module: str, arguments: Sequence[str], ranks: int, rate: str | None, environment: Mapping[str, str] | None = None
) -> int:
    """Run `python -m module *arguments` on every rank and wait for all of them.

    When a rank fails, the others have some seconds to end; then they are killed. A request to end (Ctrl-C, SIGTERM,
    SIGHUP) ends all ranks immediately, removes the links and raises SystemExit. When this process is killed, the ranks
    end, too, and the next link removes those of this one.

    Args:
        rate: of the link between the ranks, or None for no limit.
        environment: additions to every rank's environment.

    Returns:
        0, or the exit code of the rank that failed first.

    Raises:
        LinkError: if the link cannot be made.
    """
    link: AbstractContextManager[list[tuple[list[str], dict[str, str]]]]
    link = limited_link(rate, ranks) if rate else nullcontext([([], {})] * ranks)
    command = [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]
    processes: list[subprocess.Popen] = []
    with _requests_held() as answer_requests, link as places, reserved_port() as port:
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
        }
        shared |= environment or {}
        try:
            for rank, (prefix, extra) in enumerate(places):
                answer_requests()
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **extra}
                processes.append(subprocess.Popen([*prefix, *command], env={**_QUIET, **os.environ, **shared, **own}))
            return _wait(processes, answer_requests)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


@contextmanager
def _requests_held() -> Iterator[Callable[[], None]]:
    """Requests to end wait until the function that this yields is called, or the block ends; then SystemExit is raised.

    So no request is lost, and none interrupts the set-up or the clean-up. Processes that are started in the block
    inherit the blocked signals: Ctrl-C at a terminal reaches them, too, but this process handles it. Signals that are
    already ignored, such as SIGHUP under nohup, stay ignored.
    """
    received: list[int] = []
    before = {each: handler for each in _REQUESTS if (handler := signal.getsignal(each)) != signal.SIG_IGN}

    def answer() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        if received:
            raise SystemExit(128 + received[0])

    signal.pthread_sigmask(signal.SIG_BLOCK, before)
    for each in before:
        signal.signal(each, lambda number, frame: received.append(number))
    try:
        yield answer
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        for each, handler in before.items():
            signal.signal(each, handler)
        if received:
            raise SystemExit(128 + received[0])


def _wait(processes: list[subprocess.Popen], answer_requests: Callable[[], None]) -> int:
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
        answer_requests()


def _main() -> None:
    """Run one rank."""
    end_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _REQUESTS)
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
