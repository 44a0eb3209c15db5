"""The rates of devices: a small table with the public source of every number, or the user's own file.

Rates are peak rates, so times computed from them are lower bounds: compare their ratios. A file with measured rates
gives realistic times. A link's rate is that of one device in one direction.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_chunk import yaml_text
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.hardware import Device, Link
from mindspeed_chunk.wording import one_line

GIGA, TERA, MICRO = 10**9, 10**12, 1e-6

_CLOUDMATRIX = "Serving Large Language Models on Huawei CloudMatrix384, arXiv:2506.12708, section 3"
_DIE = "one die, which is what a rank drives; a package has two of everything: 752 TFLOPS, 128 GB, 392 GB/s, 400 Gbit/s"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet (SXM): 80 GB, 3.35 TB/s, 1979 and 3958 TFLOPS with sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (SXM): 141 GB, 4.8 TB/s, 1979 and 3958 TFLOPS with sparsity"
_NVLINK = "NVIDIA H100 and H200 data sheets: NVLink 900 GB/s, which is both directions together"
_CONNECTX = "NVIDIA DGX H100/H200 data sheet: eight ConnectX-7 of 400 Gbit/s for eight GPUs"
_DENSE = "NVIDIA H100 data sheet's footnote: dense rates are half of those with sparsity"


def _hopper(name: str, memory: int, memory_rate: float, source: str) -> Device:
    return Device(
        name=name,
        memory=memory * GIGA,
        flops={"bf16": 989.5 * TERA, "fp8": 1979 * TERA},
        memory_rate=memory_rate * TERA,
        intra=Link(rate=450 * GIGA),
        inter=Link(rate=50 * GIGA),
        sources=(source, _DENSE, _NVLINK, _CONNECTX),
    )


# 1.6 TB/s per die: its four memory stacks. Inside a node the UB plane, between nodes the RDMA plane.
_ASCEND_910C = Device(
    name="ascend-910c",
    memory=64 * GIGA,
    flops={"bf16": 376 * TERA},
    memory_rate=1.6 * TERA,
    intra=Link(rate=196 * GIGA),
    inter=Link(rate=25 * GIGA),
    sources=(_CLOUDMATRIX, _DIE, "no fp8: its 8-bit matrix format is int8 (same paper)"),
)
DEVICES: dict[str, Device] = {
    "ascend-910c": _ASCEND_910C,
    # all nodes are in one supernode, which the UB plane connects at the same rate as inside a node (same paper)
    "ascend-910c-supernode": dataclasses.replace(_ASCEND_910C, name="ascend-910c-supernode", inter=_ASCEND_910C.intra),
    "h100": _hopper("h100", 80, 3.35, _H100),
    "h200": _hopper("h200", 141, 4.8, _H200),
}


class _Number(NamedTuple):
    """A number of a device file: the factor to the unit of a Device, and its smallest and largest value."""

    unit: float
    smallest: float
    largest: float

    def read(self, value: Any, path: str) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not self.smallest <= value <= self.largest:  # nan is not
            rule = f"must be a number of at least {self.smallest} and at most {self.largest}"
            raise ConfigError.about(path, value, rule, "correct it")
        return float(value) * self.unit


# Keys of a device file. No device is near the limits: a number beyond them is a mistake, or in another unit.
_MEMORY, _RATE, _FLOPS = _Number(GIGA, 0.001, 10**6), _Number(GIGA, 1e-6, 10**6), _Number(TERA, 1e-6, 10**6)
_LATENCY, _BYTES, _SECONDS = _Number(MICRO, 0, 10**6), _Number(1, 1, 10**15), _Number(1, 1e-9, 10**6)
_REQUIRED = {"memory_gb": _MEMORY, "memory_gb_per_s": _RATE, "intra_gb_per_s": _RATE, "inter_gb_per_s": _RATE}
_OPTIONAL = {
    "flops_bf16": _FLOPS,
    "flops_fp8": _FLOPS,
    "flops_fp32": _FLOPS,
    "intra_latency_us": _LATENCY,
    "inter_latency_us": _LATENCY,
    "call_us": _LATENCY,
}
_TABLES = ("intra_messages", "inter_messages")
_TEXTS = {"name": 80, "source": 500}  # characters at most
_MOST_MESSAGES = 1000


def load_device(name: str) -> Device:
    """A device of the table, or the one in a yaml or json file.

    Raises:
        ConfigError: naming the known devices, or the wrong key of the file.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    path = Path(name)
    if os.sep not in name and not os.path.lexists(path):
        rule = f"neither a file nor a device of the table ({', '.join(DEVICES)})"
        raise ConfigError.about("--device", name, rule, "give one of the two")
    return _from_file(yaml_text.load(yaml_text.read(path), f"--device {path}").data, path)


def _from_file(content: Any, path: Path) -> Device:
    example = "see docs/planner.md for an example"
    if not isinstance(content, Mapping):
        raise ConfigError.about(f"--device {path}", content, "must be a mapping", example)
    known = (*_REQUIRED, *_OPTIONAL, *_TABLES, *_TEXTS)
    for key, value in content.items():
        if key not in known:
            raise ConfigError.about(f"--device {path}: {key}", value, "unknown key", f"known are {', '.join(known)}")
    missing = [key for key in _REQUIRED if key not in content]
    if missing or not any(key.startswith("flops_") for key in content):
        raise ConfigError.about(f"--device {path}", ", ".join(missing or ["flops_bf16"]), "is missing", example)
    numbers = {
        key: number.read(content[key], f"--device {path}: {key}")
        for key, number in {**_REQUIRED, **_OPTIONAL}.items()
        if key in content
    }
    links = {
        side: Link(
            rate=numbers[f"{side}_gb_per_s"],
            latency=numbers.get(f"{side}_latency_us", 0.0),
            measured=_table(content[key], f"--device {path}: {key}") if (key := f"{side}_messages") in content else (),
        )
        for side in ("intra", "inter")
    }
    return Device(
        name=_text(content, "name", path, path.stem),
        memory=numbers["memory_gb"],
        flops={key.removeprefix("flops_"): value for key, value in numbers.items() if key.startswith("flops_")},
        memory_rate=numbers["memory_gb_per_s"],
        call=numbers.get("call_us", 0.0),
        sources=(_text(content, "source", path, str(path)),),
        **links,
    )


def _text(content: Mapping, key: str, path: Path, default: str) -> str:
    if key not in content:
        return one_line(default)
    value, max_chars = content[key], _TEXTS[key]
    if not isinstance(value, str | int | float) or not str(value).isprintable() or not 0 < len(str(value)) <= max_chars:
        rule = f"must be one line of text, at most {max_chars} characters"
        raise ConfigError.about(f"--device {path}: {key}", value, rule, "correct it")
    return str(value)


def _table(value: Any, path: str) -> tuple[tuple[float, float], ...]:
    """[[bytes, seconds], ...] of at least two messages, in order."""
    rule = f"must be a list of [bytes, seconds], at least two and at most {_MOST_MESSAGES}, in order of bytes"
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ConfigError.about(path, value, rule, "correct it")
    table = tuple(
        (_BYTES.read(nbytes, f"{path}[{n}][0]"), _SECONDS.read(seconds, f"{path}[{n}][1]"))
        for n, (nbytes, seconds) in enumerate(value)
    )
    if not 2 <= len(table) <= _MOST_MESSAGES or any(a[0] >= b[0] for a, b in zip(table, table[1:])):
        raise ConfigError.about(path, value, rule, "correct it")
    return table
