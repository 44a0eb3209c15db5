"""Every script of benchmarks/ runs to its end, with small sizes. What it says of speed or memory is not tested."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import HANG_S

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"


def torchrun(ranks):
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]


# script: (words before it, arguments, possible exit codes, text of its result)
TINY = ["--", "--tokens", "16", "--hidden", "16", "--intermediate", "16", "--cases", "rolling:1", "--repeats", "3"]
SCRIPTS = {
    "against": ([], ["HEAD", "--rounds", "1", *TINY], [0], "1 rounds; medians, quartiles"),
    "import_cost": ([], ["--runs", "3"], [0, 1], "bound of 20 ms"),
    # three steps cannot learn as much as it expects
    "loss_curves": (torchrun(2), ["--steps", "3", "--only", "N=2"], [1], "fell by less than"),
    "mbs_memory": (torchrun(2), ["--sequence", "32", "--first", "1"], [0, 1], "ChunkMBS, recompute, offload"),
    "mbs_speed": ([], ["--micro-batches", "2", "--sequence", "16", "--repeats", "2"], [0], "ratio of the steps"),
    "mbs_traffic": (torchrun(4), ["--dispatchers", "chunkmoe"], [0], "chunkmoe, ChunkMBS, 4 micro-chunks"),
    "step_speed": (
        [], ["--only", "per_rank, N=4", "--rounds", "1", "--steps", "3", "--hidden", "64", "--sequence", "32"], [0],
        "one step, embedded trainer, 1 runs of each case; losses apart by",
    ),
}  # fmt: skip


def test_every_script_is_run():
    assert sorted(SCRIPTS) == sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "example")


@pytest.mark.skipif("BENCHMARKS" not in os.environ, reason="BENCHMARKS is not set; ci/short.sh sets it and runs this")
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_to_its_end(name):
    before, arguments, codes, text = SCRIPTS[name]
    if name == "against" and not (ROOT / ".git").exists():
        pytest.skip("no commit to compare with: not a checkout")
    command = [sys.executable, *before, str(FOLDER / f"{name}.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert done.returncode in codes, done.stdout + done.stderr
    assert text in " ".join(done.stdout.split()), done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["step_speed", "--hidden", "100"], "--hidden: 100: must be a multiple of 64; correct it"),
        (["step_speed", "--trainer", "stock"], "--trainer stock: MINDSPEED_HOME and MINDSPEED_MM_HOME must be set"),
        (["step_speed", "--link", "fast"], "--link fast: must be a number and one of"),
        (["against", "no-such-commit"], "git rev-parse: fatal: Needed a single revision"),
        (["against", "HEAD", "--rounds", "0"], "--rounds: 0: must be at least 1"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, error):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MINDSPEED")}
    command = [sys.executable, str(FOLDER / f"{arguments[0]}.py"), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert done.returncode == 2 and error in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout
