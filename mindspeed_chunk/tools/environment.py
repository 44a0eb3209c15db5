"""The parts of `doctor` and `check` without heavy imports: versions, requirements, environment variables."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PLUGIN = "mindspeed_chunk"
CANN_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
TORCH_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_VARIABLES = ("ASCEND", "HCCL", "TORCH_", "PYTORCH_", "TASK_QUEUE", "MULTI_STREAM", "NCCL", "CUDA_")
_HCCL_BUFFER_MB = 200  # HCCL's default
# files, and the text before the version
_DRIVERS = {"/usr/local/Ascend/driver/version.info": "Version=", "/proc/driver/nvidia/version": "Kernel Module"}
# files below the toolkit's folder, and the key of the line with the version
_CANN_FILES = (
    ("*-linux/ascend_toolkit_install.info", "version"),
    ("ascend_toolkit_install.info", "version"),
    ("compiler/version.info", "Version"),
)


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "torch_npu": version_of("torch_npu"),
        "CANN": cann_version(),
        "mindspeed": version_of("mindspeed"),
        "mindspeed_mm": version_of("mindspeed-mm"),
        PLUGIN: version_of(PLUGIN),
    }


def cann_version() -> str | None:
    """The version of the toolkit to which the environment variables of its `set_env.sh` point."""
    for home in filter(None, map(os.environ.get, CANN_HOMES)):
        for pattern, key in _CANN_FILES:
            for file in sorted(Path(home).glob(pattern)):
                for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                    name, _, value = line.partition("=")
                    if name.strip() == key:
                        return value.strip()
    return None


def driver_version() -> str | None:
    """Of the first driver that the system shows: Ascend's, or NVIDIA's."""
    for path, mark in _DRIVERS.items():
        with contextlib.suppress(OSError):
            for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
                if mark in line:
                    return line.partition(mark)[2].strip()
    return None


def of_device(kind: str) -> dict[str, Any]:
    """For a report about a device: versions, driver, variables, and warnings about these."""
    from mindspeed_chunk.tools import devices

    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return {
        "versions": versions(),
        "driver": driver_version(),
        "device": devices.name(kind),
        "devices": devices.count(kind),
        "variables": variables,
        "warnings": warnings(variables, kind),
    }


def warnings(variables: Mapping[str, str], kind: str | None, chunk_bytes: float = 0.0) -> list[str]:
    """What a variable of a device or of its communication library does to chunks.

    Args:
        kind: the device's; a variable without a meaning there has no warning.
        chunk_bytes: of the rows that a rank sends for a chunk; 0 if unknown.
    """
    found = []
    mode = variables.get("HCCL_OP_EXPANSION_MODE", "")
    if "AIV" in mode.upper():
        rule = "HCCL has it for inference with one communication group; training with several groups may hang"
        found.append(f"HCCL_OP_EXPANSION_MODE={mode}: {rule}; unset it")
    if kind != "npu" and variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        rule = "all streams share one queue, in which an all-to-all waits behind matmuls"
        found.append(f"CUDA_DEVICE_MAX_CONNECTIONS=1: {rule}; unset it")
    size, needed = variables.get("HCCL_BUFFSIZE", ""), math.ceil(chunk_bytes / 2**20)
    buffer = int(size) if size.isdecimal() and len(size) < 10 else _HCCL_BUFFER_MB
    if (size or kind == "npu") and buffer < needed:
        rule = f"a chunk has {needed} MB, which HCCL sends in pieces of at most this size"
        found.append(f"HCCL_BUFFSIZE={buffer}: {rule}; set {needed} or more, or use more chunks")
    return found


def broken_requirements() -> list[str]:
    """Base requirements of the plugin that this environment does not meet; empty if the plugin is not installed."""
    if version_of(PLUGIN) is None:
        return []
    broken = []
    for requirement in map(Requirement, importlib.metadata.requires(PLUGIN) or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        # "2.7.1+cpu" and release candidates of a version in the range are in the range
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            rule = f"must be {requirement.specifier or 'there'}"
            broken.append(f"{requirement.name}: {version or 'not installed'}: {rule}")
    return broken


def entry_point_installed() -> bool:
    return any(point.name == PLUGIN for point in importlib.metadata.entry_points(group="torch.backends"))
