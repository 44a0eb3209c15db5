"""The rates of devices: of the table (`known_devices.py`), or of the user's file.

Rates are peak rates, so times computed from them are lower bounds: compare their ratios. A file with measured rates
gives realistic times. A link's rate is that of one device in one direction.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_chunk import yaml_text
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.hardware import Device, Link
from mindspeed_chunk.known_devices import ALIASES, DEVICES, GIGA, TERA
from mindspeed_chunk.wording import one_line

MICRO = 1e-6


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
    "launch_us": _LATENCY,
}
_TABLES = ("intra_messages", "inter_messages")
_TEXTS = {"name": 80, "source": 500}  # characters at most
_MOST_MESSAGES = 1000


def load_device(name: str) -> Device:
    """A device of the table, by its name or one of `ALIASES`, or the one in a yaml or json file.

    Raises:
        ConfigError: naming the known devices, or the wrong key of the file.
    """
    known = ALIASES.get(name.lower(), name.lower())
    if known in DEVICES:
        return DEVICES[known]
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
        launch=numbers.get("launch_us", 0.0),
        sources=(_text(content, "source", path, str(path)),),
        intra=links["intra"],
        inter=links["inter"],
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
