"""ci/npu_check.sh without an NPU, and the check of the all-to-all that it makes, on CPU ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from launcher import HANG_S, run_ranks, torchrun

CI = Path(__file__).parents[2] / "ci"


def run(*command, **environment):
    environment = {**os.environ, "PYTHONPATH": str(CI.parent), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S)


def test_without_an_npu_it_says_why_it_does_nothing(tmp_path):
    done = run("bash", str(CI / "npu_check.sh"), PYTHON=sys.executable, OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: torch_npu ") and not (tmp_path / "out").exists()


def test_rows_that_arrive_are_told_of_in_a_table_and_a_record(tmp_path):
    script = (str(CI / "wire_check.py"), "--device", "cpu", "--out", str(tmp_path))
    done = run(*torchrun(2), *script, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "all-to-all over gloo, 2 ranks, there and back: every row arrived" in done.stdout
    record = json.loads((tmp_path / "wire.json").read_text())
    assert [told["rows"] for told in record["by_rank"]] == [32, 96]  # 0 and 32; 32 and 64


def lose_rows(rank, world_size):
    """The first lines of `exchange` that notice, on a wire that reports success and brings zeros."""
    sys.path.insert(0, str(CI))
    import torch
    import wire_check

    original = dist.all_to_all_single

    def zeros(output, *args, **kwargs):
        work = original(output, *args, **kwargs)
        work.wait()
        output.zero_()
        return work

    dist.all_to_all_single = zeros
    try:
        wire_check.exchange(rank, world_size, 8, torch.device("cpu"))
    except ValueError as error:
        return str(error)


def test_rows_that_are_lost_are_an_error_on_every_rank():
    for told in run_ranks(lose_rows, 2):
        assert "rank 0: rows of 2048 bf16 columns, [0, 4] of them, did not arrive as they were sent" in told
        assert "rank 1: " in told
