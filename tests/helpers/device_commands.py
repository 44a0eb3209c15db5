"""Commands that run on a device, and what an owner of one gets from ci/gpu_check.sh and ci/npu_check.sh."""

import json
import subprocess
import sys
from pathlib import Path

from json_records import assert_record
from launcher import HANG_S
from mindspeed_chunk.planner import load_device

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--tokens", "64", "--hidden", "32", "--intermediate", "16", "--top-k", "2", "--experts", "16")
CASES = "rolling:1,rolling:2"
FILES = {"record.json", "report.txt", "device.yaml", "layer.html", "layer.json", "layer.rank0.json"}


def run(*command, environment=None):
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, env=environment)


def command(name, *words, environment=None):
    return run(sys.executable, "-m", "mindspeed_chunk.tools", name, *SIZES, *map(str, words), environment=environment)


def assert_complete(folder, ended, ranks):
    """Everything that an owner of a device sends; returns the record and the report."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record, report = json.loads((folder / "record.json").read_text()), (folder / "report.txt").read_text()
    assert_record("bench", record)
    assert {path.name for path in folder.iterdir()} >= FILES and report == ended.stdout
    assert {each["what"] for each in record["values"]} >= {"permute", "grouped_mm", "activation offload"}
    assert [each["case"] for each in record["cases"]][:2] == CASES.split(",")
    assert record["options"]["dtype"] == "bfloat16"
    assert all(each["peak"] > each["kept"] > 0 for each in record["cases"])
    assert f"recommended: {record['recommended']}, the fewest chunks" in report
    assert load_device(str(folder / "device.yaml")).flops["bf16"] > 0
    for rank in range(ranks):  # their tables of the time on the wire and of the actions
        for direction in ("forward", "backward"):
            of_wire, of_actions = (line for line in report.splitlines() if line.startswith(f"{rank}, {direction}"))
            assert of_wire.count("%") == 1 and all(float(ms) > 0 for ms in of_actions.split()[3:6])
    assert report.endswith(f"done: send the folder {folder}\n")
    return record, report
