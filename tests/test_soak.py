"""The long runs of `tests/soak`, short: they still run, they compute what they say, and they fail where they should."""

import json
import math
import random
import subprocess
import sys

import pytest
import torch

from launched import misbehave
from launcher import busy, wait_for
from soak import fuzz, interrupted, killed_rank, mutants, plans, train, yamls
from soak.drawn import Drawn
from soak.killed import MOMENTS
from soak.pool import Broken, Pool
from soak.watched import Watched


def test_training_stays_with_alltoall(tmp_path):
    record = tmp_path / "record.json"
    train.main(["--steps", "4", "--ranks", "2", "--probe", "2", "--window", "2", "--sample", "1", "--out", str(record)])
    told = json.loads(record.read_text())
    assert told["from the same weights"]["ok"] and told["from the same weights"]["probes"] == 2
    assert told["curves"]["largest"]["chunked"] < 1e-5
    assert all(rank["slope"] == 0 for rank in told["memory"]["chunked"]["tensors"])
    # the resident set is still growing in so few steps
    assert all(len(rank) == 4 for rank in told["raw"]["memory"]["chunked"])


def samples(leak, noise):
    draw = random.Random(0)
    return [(step, int(1e9 + leak * step + draw.gauss(0, noise)), 0) for step in range(0, 2000, 20)]


def test_a_leak_is_told_from_noise():
    assert train.slope([(0, 1), (1, 3), (2, 5)]) == (2, 0)
    assert train.growth(samples(0, 1e5), 1, 1024)["ok"]
    assert not train.growth(samples(2000, 1e5), 1, 1024)["ok"]
    found = train.growth(samples(2000, 1e5), 1, 1024)
    assert found["slope"] == pytest.approx(2000, abs=3 * found["error"])


def told_by_a_rank(**change):
    """What `judge` is handed, with some of it changed."""
    memory = [(step, 10**9, 10**6) for step in range(0, 100, 10)]
    probe = {"step": 0, "loss": 1e-8, "routers": 1e-7, "experts": 1e-7, "others": 1e-7, "parted": 0}
    told = {name: {"losses": [5.0] * 100, "memory": memory} for name in ("chunked", "alltoall", "control")}
    told["control"]["losses"] = [5.0 + 0.01 * (-1) ** (step // 10) for step in range(100)]
    told["probes"] = [probe] * 20
    for name, value in change.items():
        told[name] = value
    return told


@pytest.mark.parametrize(
    "part, change",
    [
        ("from the same weights", {"probes": [{**told_by_a_rank()["probes"][0], "experts": 1e-4}]}),
        ("from the same weights", {"probes": [{**told_by_a_rank()["probes"][0], "parted": 1}]}),
        ("curves", {"chunked": {**told_by_a_rank()["chunked"], "losses": [5.1] * 100}}),
        ("memory", {"chunked": {**told_by_a_rank()["chunked"], "memory": [(s, 10**9, 100 * s) for s in range(99)]}}),
    ],
)
def test_the_verdict_sees_each_fault(part, change):
    assert all(found["ok"] for found in train.judge([told_by_a_rank()], 10).values())
    found = train.judge([told_by_a_rank(), told_by_a_rank()], 10)
    assert all(verdict["ok"] for verdict in found.values())
    found = train.judge([told_by_a_rank(**change)], 10)
    assert [name for name, verdict in found.items() if not verdict["ok"]] == [part]


def test_a_configuration_is_one_line():
    case = Drawn(ranks=2, tokens=(0, 3), dtype=torch.bfloat16, router_dtype=torch.float32, frozen=("x",), limit=0.5)
    assert Drawn.read(case.line()) == case
    assert "\n" not in case.line()
    assert Drawn().line() == "{}"


def test_random_configurations_match_the_reference(capsys):
    assert fuzz.main(["--examples", "20", "--ranks", "2"]) == 0
    assert int(capsys.readouterr().out.partition(" configurations")[0].split()[-1]) >= 20


def test_random_plans_are_right_or_refused(capsys):
    """With more time than on an idle machine."""
    assert plans.main(["--examples", "30", "--limit", "10"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("30 option sets") and " x 0, " in told and " x 2; " in told


@pytest.mark.parametrize(
    "ran, told",
    [
        (plans.Ran(0, 0.1, "{}", ""), None),
        (plans.Ran(None, 0.1, "", "Traceback"), "Traceback"),
        (plans.Ran(2, 0.1, "", "error: no\nway\n"), "not one line"),
        (plans.Ran(2, 0.1, "a plan", "error: no\n"), "not one line"),
        (plans.Ran(0, 0.1, "{}", "warning"), "and an error"),
        (plans.Ran(3, 0.1, "", ""), "exit code 3"),
        (plans.Ran(2, 1.5, "", "error: no\n"), "took 1.50 s"),
    ],
)
def test_each_fault_of_a_plan_is_seen(ran, told, monkeypatch):
    monkeypatch.setattr(plans, "wrong_numbers", lambda report: iter(()))
    found = list(plans.verdict(plans.Given(["--json"]), ran))
    assert found == [] if told is None else len(found) == 1 and told in found[0]


def test_each_wrong_number_of_a_plan_is_seen():
    words = ["--model", "35b", "--nodes", "2", "--devices-per-node", "8", "--device", "h100", "--json"]
    report = json.loads(plans.run(plans.Given(words)).out)
    assert list(plans.wrong_numbers(report)) == []
    for value in (0, -1.0, math.nan, math.inf):
        for place, key in (
            (report["layouts"][0], "step"),
            (report["chunks"][5], "backward"),
            (report["job"], "memory"),
        ):
            kept, place[key] = place[key], value
            assert list(plans.wrong_numbers(report)), (key, value)
            place[key] = kept


def test_a_wrong_result_is_made_small_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "KEPT", tmp_path / "kept.jsonl")

    def ask(self, line):
        case = Drawn.read(line)
        return [("rank 0: off" if case.keep == "rows" and case.tokens[0] > 2 else "", {})]

    monkeypatch.setattr(Pool, "ask", ask)
    assert fuzz.main(["--examples", "300", "--ranks", "1"]) == 1
    printed = capsys.readouterr().out
    smallest = Drawn(ranks=1, tokens=(3,), keep="rows", experts=1, top_k=1, hidden=1, intermediate=1)
    assert printed.rstrip().endswith(f"--replay '{smallest.line()}'")
    assert fuzz.read_kept() == [smallest]
    # it comes first from now on, before anything is drawn
    assert fuzz.main(["--examples", "300", "--ranks", "1"]) == 1
    assert "among 1 configurations" in capsys.readouterr().out


def test_an_exception_and_a_hang_of_one_rank_are_found_and_ranks_start_again():
    pool = Pool(misbehave, 2, limit=2 * busy())
    try:
        assert pool.ask("fine") == [0, 1]
        with pytest.raises(Broken, match="rank 1 gives up"):
            pool.ask("raise")
        assert pool.ask("fine") == [0, 1]
        with pytest.raises(Broken, match="in misbehave"):
            pool.ask("hang")
    finally:
        pool.close()


def test_yamls_with_mistakes_are_refused_in_one_line(capsys):
    assert yamls.main(["--examples", "200", "--limit", "10"]) == 0, capsys.readouterr().out
    assert "200 yamls" in capsys.readouterr().out
    texts = mutants.seeds()
    assert mutants.mutant(texts, 3, 8) == mutants.mutant(texts, 3, 8) != mutants.mutant(texts, 4, 8)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda *arguments: 1 // 0, "ZeroDivisionError"),
        (lambda *arguments: bytearray(10**9), "MemoryError"),
        (lambda *arguments: all(True for _ in iter(int, 1)), "still at work after"),
    ],
)
def test_a_reader_that_fails_in_another_way_is_found(tmp_path, monkeypatch, fault, told):
    monkeypatch.setattr(yamls, "load_config", fault)
    with pytest.raises(yamls.Failed, match=told):
        yamls._watched("trainer", lambda: yamls._trainer(tmp_path), 0.2)


def test_a_killed_rank_ends_the_others(capsys):
    moment = next(iter(MOMENTS))
    fate = killed_rank.kill(moment, killed_rank.ALONE, ranks=2, culprit=1, timeout=10 * busy(), grace=10 * busy())
    assert fate.wrong == [] and math.isfinite(fate.seconds)


def test_interrupted_launches_end_at_once_and_leave_nothing(capsys):
    assert interrupted.main(["--launches", "5", "--limit", str(10 * busy())]) == 0
    assert "5 of 5 ended at once and left nothing" in capsys.readouterr().out


def test_what_is_left_behind_is_seen():
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(3000)"
    with Watched() as watched:
        process = subprocess.Popen([sys.executable, "-c", code], env=watched.environment)
        try:
            wait_for(lambda: any("port" in left for left in watched.left()))
            left = watched.left()
        finally:
            process.kill()
            process.wait()
    assert f"process {process.pid}" in left and any(found.startswith("port") for found in left)
    assert watched.left() == []
