"""The launcher of ranks: results, failures, hangs, and nothing left behind."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import conftest
import launched
import launcher
from launcher import HANG_S, RanksFailed, busy, run_ranks, wait_for
from zygote import Zygote, alive, children_of


def test_what_a_shell_has_set_does_not_reach_the_tests(monkeypatch):
    inherited = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR LC_ALL LANG TERM NO_COLOR COLUMNS PYTHONWARNINGS PYTHONHASHSEED"
    ours = "MINDSPEED_CHUNK_DISABLE TORCH_DEVICE_BACKEND_AUTOLOAD"
    stay = "MINDSPEED_MM_HOME MINDSPEED_HOME MINDSPEED_CHUNK_TORCH_NPU PYTHONPATH PATH CI"
    for name in f"{inherited} {ours} {stay}".split():
        monkeypatch.setenv(name, "set")
    before = os.umask(0o077)
    try:
        conftest.pytest_sessionstart()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert os.environ["LC_ALL"] == "C.UTF-8"
    assert {*inherited.split(), *ours.split(), *stay.split()} & {*os.environ} == {*stay.split(), "LC_ALL"}


@pytest.mark.parametrize("time", ["first", "second"])
def test_what_a_test_sets_ends_with_it(time):
    assert "SET_BY_A_TEST" not in os.environ
    os.environ["SET_BY_A_TEST"] = time


def test_results_come_back_in_rank_order():
    results = run_ranks(launched.add, 2, 3, scale=2)
    assert len(results) == 2
    for result in results:
        assert torch.equal(result, torch.full((3,), 14.0))


# Ranks are forks of a zygote, or, with an environment of their own, fresh processes.
FRESH = pytest.param({"FRESH": "yes"}, id="fresh", marks=pytest.mark.slow)
ROADS = pytest.mark.parametrize("env", [pytest.param(None, id="forks"), FRESH])


def test_forks_have_the_surroundings_of_fresh_processes():
    forks, fresh = (run_ranks(launched.surroundings, 2, env=env) for env in (None, {"FRESH": "yes"}))
    for rank, (fork, other) in enumerate(zip(forks, fresh, strict=True)):
        assert other["environment"].pop("FRESH") == "yes"
        assert fork == other
        assert fork["environment"]["RANK"] == str(rank) and fork["environment"]["OMP_NUM_THREADS"] == "1"
        assert fork["folder"] == os.getcwd() and fork["leads its group"]
        assert (fork["threads"], fork["nan"], fork["size"]) == (1, True, 2)


def test_environment_is_as_asked_and_as_it_is_now(monkeypatch):
    (seen,) = run_ranks(launched.surroundings, 1, env={"SEEN": "yes", "HOME": None}, fill_nan=False)
    assert seen["environment"]["SEEN"] == "yes" and "HOME" not in seen["environment"]
    assert not seen["nan"]
    monkeypatch.setenv("SEEN", "later")
    (seen,) = run_ranks(launched.surroundings, 1)
    assert seen["environment"]["SEEN"] == "later"


def test_chance_is_another_on_every_rank():
    """Hashes differ between neighbours at least, so that an order of a set is not the same on all ranks."""
    hashes, *numbers = zip(*run_ranks(launched.chance, 4), *run_ranks(launched.chance, 4))
    assert all(len(set(values)) == 8 for values in numbers)
    assert len(set(hashes)) == 2


def test_exit_code_and_output_of_a_fork(tmp_path):
    with open(os.devnull) as stdin, open(tmp_path / "output", "w") as output:
        call = [launched.__name__, launched.tell_and_exit.__name__, [3]]
        process = launcher.zygote(0).fork(call, {}, (stdin.fileno(), output.fileno(), output.fileno()))
        assert process.reap() == 3
    # stdout, unlike stderr, may be written at the end
    assert sorted((tmp_path / "output").read_text().splitlines()) == ["told", "told, too"]


@pytest.mark.slow
def test_why_a_zygote_cannot_fork_is_told(tmp_path, monkeypatch):
    code = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    zygote = Zygote(os.environ)
    with pytest.raises(RuntimeError, match="after the import of threaded there are threads"):
        zygote.fork(None, {}, (), imports=["leaves", "threaded", "json"])
    assert zygote.ended
    with pytest.raises(RuntimeError, match="the zygote has ended with exit code -9"):
        zygote.fork(None, {}, ())


def test_a_zygote_that_dies_leaves_no_rank_and_the_next_launch_has_another(tmp_path):
    with pytest.raises(RuntimeError, match="the zygote has ended with exit code -9"):
        run_ranks(launched.kill_the_zygote, 3, str(tmp_path), launcher.zygote(0).pid)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    wait_for(lambda: not any(map(alive, pids)))
    assert len(run_ranks(launched.add, 3, 1)) == 3


def test_own_traceback_comes_first_and_nobody_waits():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(launched.raise_on, 2, 1, grace=HANG_S)
    assert [outcome.state for outcome in failure.value.outcomes] == ["raised", "raised"]
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
        run_ranks(launched.hang_in_collective, 2, timeout=10 * busy())
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


@ROADS
def test_processes_that_a_rank_started_end_with_it(env):
    ((own, sleeper),) = run_ranks(launched.start_a_sleeper, 1, env=env)
    assert not alive(own)
    assert wait_for(lambda: not alive(sleeper))


@ROADS
def test_ranks_end_when_the_parent_is_killed(tmp_path, env):
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import pathlib, launcher, launched\n"
        f"launcher.run_ranks(launched.sleep_forever, 2, pathlib.Path({str(pids)!r}), env={env!r})\n"
    )
    # It cannot clean up any more: its folder goes where pytest cleans up. Python tries that folder with a file of a
    # random name, which may begin with a digit.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        children = wait_for(lambda: ids if len(ids := [int(p.name) for p in pids.iterdir()]) == 2 else None)
        started = children_of(parent.pid)
        assert all(map(alive, children)) and len(started) >= 2
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    assert wait_for(lambda: not any(map(alive, {*children, *started})))
