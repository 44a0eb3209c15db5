"""The variables that `doctor`, and a report of `bench` about a device, warn of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import HANG_S
from mindspeed_chunk.tools import environment

ROOT = Path(__file__).resolve().parents[2]


def command(*words, **variables):
    environ = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    words = [sys.executable, "-m", "mindspeed_chunk.tools", "doctor", *words]
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=HANG_S)


LARGE = {"HCCL_BUFFSIZE": "201"}


@pytest.mark.parametrize(
    "variables, kind, expected",
    [
        ({"HCCL_OP_EXPANSION_MODE": "AIV", **LARGE}, "npu", "HCCL_OP_EXPANSION_MODE=AIV: HCCL has it for inference"),
        ({"HCCL_OP_EXPANSION_MODE": "AI_CPU", **LARGE}, "npu", None),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "cuda", "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one queue"),
        # MindSpeed-MM's scripts set it, and it has no effect there
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", **LARGE}, "npu", None),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "cuda", None),
        ({"HCCL_BUFFSIZE": "120"}, "npu", "HCCL_BUFFSIZE=120: a chunk has 201 MB"),
        ({}, "npu", "HCCL_BUFFSIZE=200: a chunk has 201 MB, which HCCL sends in pieces of at most this size; set 201 "),
        (LARGE, "npu", None),
        ({}, "cuda", None),
    ],
)
def test_variables_that_slow_a_run_or_hang_it(variables, kind, expected):
    found = environment.warnings(variables, kind, chunk_bytes=200.5 * 2**20)
    assert len(found) == (expected is not None) and all(each.startswith(expected) for each in found)


def test_doctor_warns_of_variables_and_of_buffers_smaller_than_a_chunk():
    yaml = ROOT / "examples" / "qwen3_5_35b" / "tiny.yaml"  # its chunks have less than 1 MB
    variables = {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_BUFFSIZE": 0, "CUDA_DEVICE_MAX_CONNECTIONS": 1}
    answer = command("--json", "--config", str(yaml), **variables)
    notes = "\n".join(json.loads(answer.stdout)["notes"])
    assert all(f"{name}={value}: " in notes for name, value in variables.items()), notes
    assert command("--config", "no-such.yaml").returncode == 2
