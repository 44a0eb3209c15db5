"""What a layer call costs an NPU, from the data of tests/ascend: counts, and where operations run; no torch_npu."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from markdown_table import table

TESTS = Path(__file__).resolve().parents[2] / "tests" / "ascend"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def counts() -> str:
    """The counts of `costs.json`, one line per call."""
    head = ("dispatch", "N", "rows", "kept", "recompute", "device ops", "on the AI CPU", "scattered", "passes", "waits")
    rows = []
    for call in json.loads((TESTS / "costs.json").read_text(encoding="utf-8")):
        cells = (
            f"`{call['dispatch']}`",
            call["chunks"],
            call["routing"] + (", padded" if call["padded"] else ""),
            f"`{call['keep']}`",
            "yes" if call["recompute"] else "no",
            call["device_ops"],
            sum(call["on_ai_cpu"].values()),
            call["scattered"],
            call["passes"],
            call["host_waits"],
        )
        rows.append([str(cell) for cell in cells])
    return table(head, rows)


def kernels() -> str:
    """Which operations have an AiCore kernel for which dtypes, and where that is written."""
    costs = _costs()
    rows = []
    for kernel in costs.KERNELS:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
        dtypes = ", ".join(_SHORT.get(name, name) for name in names)
        rows.append((", ".join(f"`{op}`" for op in kernel.ops), dtypes or "none", f"`{kernel.source}`"))
    read = ", ".join(
        f"[{name}](https://github.com/{repository}/tree/{commit})"
        for name, (repository, commit) in costs.SOURCES.items()
    )
    return f"{table(('operations', 'dtypes on AiCore', 'source'), rows)}\n\nRead in {read}."


def _costs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("costs", TESTS / "costs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module
