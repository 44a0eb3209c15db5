"""The part of `doctor` without heavy imports: versions, requirements, environment variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from packaging.requirements import Requirement

PLUGIN = "mindspeed_chunk"
CANN_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
TORCH_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
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
