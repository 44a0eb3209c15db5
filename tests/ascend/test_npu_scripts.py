"""ci/npu_check.sh, bench and trace to their end on played NPUs, with the real wheel; and the script without an NPU."""

import sys

import pytest

import played_device
from device_commands import CASES, SIZES, assert_complete, command, run


def test_without_an_npu_it_says_why_it_does_nothing(tmp_path):
    ended = run("env", f"PYTHON={sys.executable}", f"OUT={tmp_path / 'out'}", "bash", "ci/npu_check.sh")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("skipped: torch_npu ") and not (tmp_path / "out").exists()


def test_npu_check_runs_to_its_end(wheel_folder, tmp_path):
    changes = {"PYTHON": sys.executable, "OUT": str(tmp_path), "CASES": CASES, "NPUS": "2"}
    environment = {**played_device.environment("npu", 3, wheel_folder), **changes}
    record, report = assert_complete(tmp_path, run("bash", "ci/npu_check.sh", *SIZES, environment=environment), ranks=2)
    assert record["wire_gb_per_s"] > 0 and record["environment"]["devices"] == 3
    assert "2 npu ranks" in report and "stand-in" not in report and "every row arrived" in report


@pytest.mark.slow
def test_bench_and_trace_run_to_their_end_on_one_npu(wheel_folder, tmp_path):
    """Its peers are played."""
    environment = played_device.environment("npu", 1, wheel_folder)
    stand_in = ("--device", "npu", "--stand-in", "--ranks", "4", "--link", "200gbit")
    words = (*stand_in, "--cases", CASES, "--repeats", "3", "--hidden-share")
    ended = command("bench", *words, environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "4 npu ranks" in ended.stdout and "hidden" in ended.stdout and "A real link hides less" in ended.stdout
    ended = command("trace", *stand_in, "--out", tmp_path / "layer", environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "0, backward" in ended.stdout and "A real link hides less" in ended.stdout
