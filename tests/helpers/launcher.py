"""Runs one function on several ranks: a process each, gloo on the CPU, every rank's fate reported.

    def check(rank, world_size, value):
        tensor = torch.full((1,), float(value))
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    def test_check():
        assert run_ranks(check, 2, 3) == [6.0, 6.0]

`function` lives at the top of a module that the children can import (they get this process's `sys.path`).

Ranks are forks of a zygote, which has imported that module, and torch, and has done nothing else. A launch with an
environment of its own (`env`), or after this process's has changed, is one of fresh processes: much of it is read when
torch is imported. Ranks with even and with odd numbers have a zygote each, so that between neighbours hash seeds and
addresses differ, as they do between processes that are started one by one.

Nothing here imports torch in the parent.
"""

import dataclasses
import faulthandler
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

from zygote import Zygote, absolute_path, stop

POLL_S = 0.02
# What runs longer hangs. Nothing else is told by it: on a busy machine a start of a rank alone may take a minute.
HANG_S = 600
DUMP_S = 0.5
# A rank that is killed leaves no time stamp of its own, and its neighbours' connection errors may be written before the
# parent sees it die: its failure counts as this much earlier than seen.
DEATH_LEAD_S = 1.0
COLLECTIVE_SLACK_S = 60
OUTPUT_TAIL_CHARS = 20_000

BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import launcher; launcher.run_child(*sys.argv[2:])"
# Changes from test to test, and is pytest's own.
NOT_HANDED_ON = "PYTEST_CURRENT_TEST"


@dataclasses.dataclass
class Outcome:
    """How one rank ended.

    state: "returned", "raised" (its own exception), "died" (a signal or an exit without a result), "stopped" (still
    running when the grace after another rank's failure was over), "timeout" (still running when the whole run's time
    was over).
    error: traceback or explanation, with the stacks of a rank that had to be killed; "" for a rank that returned.
    output: what the rank wrote to stdout and stderr.
    """

    rank: int
    state: str
    result: object = None
    error: str = ""
    output: str = ""
    failed_at: float = float("inf")

    @property
    def ok(self):
        return self.state == "returned"


class RanksFailed(AssertionError):
    """At least one rank did not return; the text holds every rank's report, the first one to fail first."""

    def __init__(self, outcomes):
        super().__init__(_report(outcomes))
        self.outcomes = outcomes


def run_ranks(
    function,
    world_size,
    *args,
    timeout=HANG_S,
    env=None,
    expect_failure=False,
    fill_nan=True,
    grace=10,
    collective_timeout=None,
    **kwargs,
):
    """Call `function(rank, world_size, *args, **kwargs)` on every rank of a new gloo group; return the ranks' results.

    timeout: seconds for the whole run; then every rank's stacks are dumped and everything is killed.
    env: additions to the children's environment; a value of None removes a variable. Without, ranks are forks.
    expect_failure: return a list of `Outcome` instead of raising.
    fill_nan: deterministic algorithms, and fresh buffers (`torch.empty`) filled with NaN.
    grace: seconds the other ranks get to end by themselves after the first failure.
    collective_timeout: seconds a collective may take; by default more than `timeout`, so that a hang ends in a stack
        dump.
    Raises RanksFailed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        folder = Path(folder)
        job = {
            "world_size": world_size,
            "fill_nan": fill_nan,
            "collective_timeout": timeout + COLLECTIVE_SLACK_S if collective_timeout is None else collective_timeout,
        }
        (folder / "job").write_bytes(pickle.dumps(job))
        (folder / "call").write_bytes(pickle.dumps((_importable(function), args, kwargs)))
        ranks = []
        try:
            start = _fork if (environment := _environment(env or {})) == first_environment() else _start
            for rank in range(world_size):
                ranks.append(_Rank(folder, rank, world_size, functools.partial(start, function, environment)))
            _watch(ranks, time.monotonic() + timeout, grace)
        finally:
            try:
                for rank, code in zip(ranks, stop([rank.process for rank in ranks]), strict=True):
                    rank.returncode = code
            finally:
                for rank in ranks:
                    rank.release()
        outcomes = [rank.outcome() for rank in ranks]
    for outcome in outcomes:
        if outcome.output:
            print(f"[rank {outcome.rank}]\n{outcome.output}")
    if expect_failure:
        return outcomes
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.result for outcome in outcomes]


def busy():
    """How many times longer than on a quiet machine something takes, for a time-out that is meant to run out."""
    return max(1.0, os.getloadavg()[0] / os.cpu_count())


def wait_for(condition):
    """What the condition comes to, once it is true."""
    end = time.monotonic() + HANG_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {HANG_S} s")
        time.sleep(POLL_S)
    return found


def torchrun(ranks):
    """The words before a script, or `-m` and a module, that is started as a user does."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]


class Fresh(subprocess.Popen):
    """A process of its own from the start; what `zygote.Forked` tells, of a child of this process."""

    def ended(self):
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self):
        return self.wait()


class _Rank:
    """The parent's view of one child; the child is the leader of a process group of its own."""

    def __init__(self, folder, rank, world_size, start):
        self.rank = rank
        self.files = _Files(folder, rank)
        self.state = None
        self.died_at = None
        self.returncode = None
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        stdin, self._lifeline = os.pipe()  # its end tells the child that the parent is gone
        try:
            with open(stdin), open(self.files.output, "wb") as output:
                self.process = start(variables, (str(folder), str(rank)), stdin, output)
        except BaseException:
            self.release()
            raise

    def running(self):
        if self.died_at is None and self.process.ended():
            self.died_at = time.monotonic()
        return self.died_at is None

    def failed(self):
        return self.files.error.exists() or (not self.running() and not self.files.result.exists())

    def dump(self, state):
        """Have the rank write its stacks; `state` says why it will be killed."""
        self.state = state
        os.kill(self.process.pid, signal.SIGUSR1)

    def release(self):
        os.close(self._lifeline)

    def outcome(self):
        """Read the fate of an ended process from its files and exit code."""
        output = self.files.output.read_text(errors="replace")
        outcome = Outcome(self.rank, "returned", output=output)
        if self.files.error.exists():
            failed_at, error = pickle.loads(self.files.error.read_bytes())
            outcome.state, outcome.failed_at, outcome.error = "raised", failed_at, error
            if self.state:
                outcome.error += f"\nafter that it did not exit:\n{self._stacks()}"
        elif self.state:
            outcome.state, outcome.failed_at = self.state, time.monotonic()
            where = "after it returned" if self.files.result.exists() else "in the call"
            outcome.error = f"still running, {where}:\n{self._stacks()}"
        elif self.returncode or not self.files.result.exists():
            outcome.state, outcome.failed_at = "died", self.died_at - DEATH_LEAD_S
            outcome.error = f"ended with exit code {self.returncode} and no traceback"
        else:
            outcome.result = pickle.loads(self.files.result.read_bytes())
        return outcome

    def _stacks(self):
        if self.files.stacks.exists():
            return self.files.stacks.read_text(errors="replace") or "no stacks were written"
        return "it had not started yet"


@functools.cache
def first_environment():
    """What a rank was given at the first launch of this process: that of all forks."""
    return _environment({})


@functools.cache
def _zygotes():
    return [Zygote(first_environment()) for _ in range(2)]


def zygote(rank):
    """The one that a rank is forked from; a new one where it has ended."""
    zygotes = _zygotes()
    place = rank % len(zygotes)
    if zygotes[place].ended:
        zygotes[place] = Zygote(first_environment())
    return zygotes[place]


def _environment(changes):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", NOT_HANDED_ON: None, **changes}
    return {name: value for name, value in environment.items() if value is not None}


def _fork(function, environment, variables, arguments, stdin, output):
    call = [__name__, run_child.__name__, arguments]
    descriptors = (stdin, output.fileno(), output.fileno())
    return zygote(int(variables["RANK"])).fork(call, variables, descriptors, imports=[function.__module__])


def _start(function, environment, variables, arguments, stdin, output):
    command = [sys.executable, "-c", BOOT, json.dumps(absolute_path()), *arguments]
    streams = {"stdin": stdin, "stdout": output, "stderr": output}
    return Fresh(command, env=environment | variables, start_new_session=True, **streams)


def _importable(function):
    """`function`, once it is sure that a child can find it under its module's name."""
    if function.__module__ == "__main__" or "<locals>" in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} of {function.__module__}: only a module's top-level function can run on ranks"
        )
    return function


def _watch(ranks, deadline, grace):
    """Return when no rank is running, or after dumping the stacks of those that overstay."""
    limit, state = deadline, "timeout"
    while running := [rank for rank in ranks if rank.running()]:
        if state == "timeout" and any(rank.failed() for rank in ranks):
            limit, state = min(deadline, time.monotonic() + grace), "stopped"
        if time.monotonic() > limit:
            for rank in running:
                rank.dump(state)
            time.sleep(DUMP_S)
            return
        time.sleep(POLL_S)


def _report(outcomes):
    failures = sorted((outcome for outcome in outcomes if not outcome.ok), key=lambda outcome: outcome.failed_at)
    returned = [str(outcome.rank) for outcome in outcomes if outcome.ok]
    lines = [f"{len(failures)} of {len(outcomes)} ranks failed, the first one: rank {failures[0].rank}"]
    for outcome in failures:
        lines.append(f"\n--- rank {outcome.rank} {outcome.state} ---\n{outcome.error.rstrip()}")
        if outcome.output.strip():
            lines.append(f"its output:\n{outcome.output[-OUTPUT_TAIL_CHARS:].rstrip()}")
    if returned:
        lines.append(f"\nreturned: rank {', '.join(returned)}")
    return "\n".join(lines)


class _Files:
    """Names of one rank's files in the run's folder."""

    def __init__(self, folder, rank):
        self.rendezvous = Path(folder) / "rendezvous"
        self.job = Path(folder) / "job"
        self.call = Path(folder) / "call"
        self.result = Path(folder) / f"{rank}.result"
        self.error = Path(folder) / f"{rank}.error"
        self.stacks = Path(folder) / f"{rank}.stacks"
        self.output = Path(folder) / f"{rank}.output"


def run_child(folder, rank):
    """The whole life of a child process; both arguments are strings from its command line."""
    rank = int(rank)
    files = _Files(folder, rank)
    # Unbuffered and kept open for the process's life: faulthandler writes to the descriptor from a signal handler.
    stacks = open(files.stacks, "wb", buffering=0)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = _call(files, rank)
    except BaseException:
        _write(files.error, pickle.dumps((time.monotonic(), traceback.format_exc())))
        sys.exit(1)
    _write(files.result, result)

    from mindspeed_chunk.dist import destroy

    destroy()


def _call(files, rank):
    """Join the group, call the function, return its pickled result."""
    job = pickle.loads(files.job.read_bytes())

    import torch
    import torch.distributed

    torch.set_num_threads(1)
    if job["fill_nan"]:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{files.rendezvous}",
        rank=rank,
        world_size=job["world_size"],
        timeout=timedelta(seconds=job["collective_timeout"]),
    )
    function, args, kwargs = pickle.loads(files.call.read_bytes())
    return pickle.dumps(function(rank, job["world_size"], *args, **kwargs))


def _end_with_parent():
    os.read(0, 1)  # not through sys.stdin, whose lock a thread must not hold when the interpreter ends
    os._exit(1)


def _write(path, content):
    """All of it or nothing: the parent may read at any time."""
    draft = path.with_suffix(path.suffix + ".draft")
    draft.write_bytes(content)
    draft.rename(path)
