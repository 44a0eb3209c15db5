"""What every command does alike: output that cannot be written, poor terminals, the variables of the ranks."""

import os
import subprocess
import sys

import pytest

from launcher import HANG_S
from lint_cases import EXAMPLE, spoilt
from mindspeed_chunk.standalone import __main__ as trainer

PROGRAM = "import sys; from mindspeed_chunk.tools.__main__ import main; sys.exit(main())"
ODD = spoilt(("dispatcher: chunkmoe", "dispatcher: 分块"), ("/tiny", "/none"))


def lint(tmp_path, stdout, **environment):
    path = tmp_path / "config.yaml"
    path.write_text(ODD, encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, "lint", str(path), "--fix", str(tmp_path / "分块.yaml")]
    environment = {**os.environ, **environment}
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=HANG_S)


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0",
                                                                         "PYTHONUTF8": "0"}])  # fmt: skip
def test_a_terminal_without_all_characters_is_shown_what_it_has(tmp_path, environment):
    done = lint(tmp_path, subprocess.PIPE, **environment)
    assert (done.returncode, done.stderr) == (1, "") and r"dispatcher: '\u5206\u5757': must be" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line_and_2(tmp_path, unbuffered):
    with open("/dev/full", "w") as full:
        done = lint(tmp_path, full, PYTHONUNBUFFERED=unbuffered)
    told = "error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"RANK": "x", "WORLD_SIZE": "1"},
            "RANK: 'x': must be an integer >= 0; start with torchrun, which",
        ),
        ({"RANK": "-1", "WORLD_SIZE": "1"}, "RANK: '-1': must be an integer >= 0"),
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE: 'x': must be an integer >= 0"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE: '999"),
        ({"RANK": "0"}, "WORLD_SIZE: is not set, but RANK is; start with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR: is not set, but RANK is; start with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT: is not set, but RANK is"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE: 2: is set, but RANK is not; start with torchrun, or unset it"),
        ({"WORLD_SIZE": "0"}, "RANK: 0: must be below WORLD_SIZE, 0"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK: 2: must be below WORLD_SIZE, 2",
        ),
    ],
)
def test_the_variables_of_a_rank_are_checked_in_one_line(variables, told, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert trainer.main([str(EXAMPLE / "tiny.yaml"), f"model.model_name_or_path={EXAMPLE / 'tiny'}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: environment variable {told}") and len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["bench", "trace"])
def test_bench_and_trace_check_the_number_of_ranks_in_one_line(command):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "x"}, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: environment variable WORLD_SIZE: 'x': must be an")
    assert len(done.stderr.splitlines()) == 1
