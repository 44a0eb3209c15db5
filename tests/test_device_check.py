"""ci/device_check.py, tried on a CPU: it runs, it stops at a wrong value, it says so where there is no device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher import HANG_S

CI = Path(__file__).resolve().parents[1] / "ci"
sys.path.insert(0, str(CI))

import device_check  # noqa: E402
import device_values  # noqa: E402


def run(*arguments):
    command = [sys.executable, str(CI / "device_check.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.slow
def test_tiny_sizes_on_a_cpu(tmp_path):
    done = run("--device", "cpu", "--out", tmp_path, "--repeats", 1)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["values"]) >= 30 and all(each["right"] for each in record["values"])
    names = [name for name, _ in device_check.cases()]
    assert [each["what"] for each in record["timed"]] == names
    assert [each["what"] for each in record["between devices"]["timed"]] == names
    assert all(each["ms on the link"] > 0 for each in record["timed"])
    assert all(name in done.stdout for name in names)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_nothing_is_timed_where_a_value_is_wrong(tmp_path, monkeypatch, capsys):
    wrong = ("regroup", 0.0, lambda ops, t: ops.regroup(t.rows, t.groups) + (ops is device_values.cuda))
    monkeypatch.setattr(device_values, "OPERATIONS", [wrong])
    monkeypatch.setattr(sys, "argv", ["device_check.py", "--device", "cpu", "--out", str(tmp_path)])
    assert device_check.main() == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert "timed" not in record and record["values"][0]["error"] > 0
    assert "wrong values; nothing is timed" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(tmp_path):
    done = run("--device", "cuda", "--out", tmp_path)
    assert done.returncode == 0 and "skipped: torch" in done.stdout
    assert "sees no CUDA device" in json.loads((tmp_path / "record.json").read_text())["skipped"]
