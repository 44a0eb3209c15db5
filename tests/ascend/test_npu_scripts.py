"""ci/npu_check.sh, bench and trace to their end on played NPUs, with the real wheel; and the script without an NPU."""

import sys

import pytest

import played_device
from test_tools_devices import CASES, SIZES, assert_complete, command, run


def test_without_an_npu_it_says_why_it_does_nothing(tmp_path):
    ended = run("env", f"PYTHON={sys.executable}", f"OUT={tmp_path / 'out'}", "bash", "ci/npu_check.sh")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("skipped: torch_npu ") and not (tmp_path / "out").exists()


def test_npu_check_runs_to_its_end(wheel_folder, tmp_path):
    environment = {**played_device.environment("npu", 3, wheel_folder), "PYTHON": sys.executable, "NPUS": "2"}
    ended = run("bash", "ci/npu_check.sh", *SIZES, *CASES, environment={**environment, "OUT": str(tmp_path)})
    record = assert_complete(tmp_path, ended, "npu", [0, 1])
    assert len(record["wire_bytes_per_s"]) == 2 and record["environment"]["devices"] == 3
    assert "2 npu ranks" in ended.stdout and "stand-in" not in ended.stdout


@pytest.mark.slow
def test_bench_and_trace_run_to_their_end_on_one_npu(wheel_folder, tmp_path):
    """Its peers are played."""
    environment = played_device.environment("npu", 1, wheel_folder)
    stand_in = ("--device", "npu", "--stand-in", "--ranks", "4", "--link", "200gbit")
    ended = command("bench", *stand_in, *CASES, "--hidden-share", environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "4 npu ranks" in ended.stdout and "hidden" in ended.stdout and "A real link hides less" in ended.stdout
    ended = command("trace", *stand_in, "--out", tmp_path / "layer", environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "0, backward" in ended.stdout and "A real link hides less" in ended.stdout
