"""The launcher of ranks: results, failures, hangs, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import launched
from launcher import RanksFailed, run_ranks


def alive(pid):
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_results_come_back_in_rank_order():
    results = run_ranks(launched.add, 2, 3, scale=2)
    assert len(results) == 2
    for result in results:
        assert torch.equal(result, torch.full((3,), 14.0))


def test_surroundings_of_a_rank():
    (seen,) = run_ranks(launched.surroundings, 1, env={"SEEN": "yes", "HOME": None})
    assert seen == {"threads": 1, "omp": "1", "seen": "yes", "home": None, "nan": True, "size": 1}
    (seen,) = run_ranks(launched.surroundings, 1, fill_nan=False)
    assert not seen["nan"]


def test_own_traceback_comes_first_and_nobody_waits_long():
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(launched.raise_on, 2, 1)
    assert time.monotonic() - start < 60
    text = str(failure.value)
    assert text.startswith("2 of 2 ranks failed, the first one: rank 1")
    assert text.index("RuntimeError: rank 1 gives up") < text.index("--- rank 0")
    assert "about to raise" in text
    assert "in raise_on" in text


def test_every_rank_is_reported_in_the_order_of_failing():
    outcomes = run_ranks(launched.raise_everywhere, 3, expect_failure=True)
    assert [outcome.state for outcome in outcomes] == ["raised"] * 3
    assert [outcome.ok for outcome in outcomes] == [False] * 3
    for rank, outcome in enumerate(outcomes):
        assert f"ValueError: no good on {rank}" in outcome.error
    text = str(RanksFailed(outcomes))
    assert text.index("no good on 2") < text.index("no good on 1") < text.index("no good on 0")


def test_a_killed_rank_comes_first():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(launched.die_on, 2, 0)
    assert [outcome.state for outcome in failure.value.outcomes] == ["died", "raised"]
    assert str(failure.value).startswith("2 of 2 ranks failed, the first one: rank 0")
    assert "exit code -9" in str(failure.value)


def test_an_exit_without_result_is_a_failure():
    (outcome,) = run_ranks(launched.leave, 1, expect_failure=True)
    assert outcome.state == "died"


def test_hang_ends_with_stacks():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(launched.hang_in_collective, 2, timeout=15)
    assert [outcome.state for outcome in failure.value.outcomes] == ["timeout", "timeout"]
    assert str(failure.value).count("in hang_in_collective") == 2


def test_others_are_stopped_after_the_grace():
    outcomes = run_ranks(launched.raise_while_other_sleeps, 2, grace=1, expect_failure=True)
    assert [outcome.state for outcome in outcomes] == ["stopped", "raised"]
    assert "in raise_while_other_sleeps" in outcomes[0].error


def test_result_that_cannot_be_pickled():
    (outcome,) = run_ranks(launched.unpicklable, 1, expect_failure=True)
    assert outcome.state == "raised"
    assert "pickle" in outcome.error


def test_functions_a_child_cannot_find_are_refused():
    with pytest.raises(ValueError, match="top-level"):
        run_ranks(lambda rank, world_size: None, 1)


def test_processes_that_a_rank_started_end_with_it():
    ((own, sleeper),) = run_ranks(launched.start_a_sleeper, 1)
    assert not alive(own)
    end = time.monotonic() + 5
    while alive(sleeper) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(sleeper)


def test_ranks_end_when_the_parent_is_killed(tmp_path):
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import launcher, launched\n"
        "started = launcher.subprocess.Popen\n"
        "class Told(started):\n"
        "    def __init__(self, *args, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
        "        print(self.pid, flush=True)\n"
        "launcher.subprocess.Popen = Told\n"
        "launcher.run_ranks(launched.sleep_forever, 2)\n"
    )
    # It cannot clean up any more: its folder goes where pytest cleans up.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    children = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(alive(pid) for pid in children)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 20
    while any(alive(pid) for pid in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)
