"""The settings of a run, from the host's arguments of any version, and from the environment."""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping
from typing import Any

DISABLE = "MINDSPEED_CHUNK_DISABLE"
DISPATCHER = "MINDSPEED_CHUNK_DISPATCHER"
CHUNK_MBS = "MINDSPEED_CHUNK_MBS"
STRICT = "MINDSPEED_CHUNK_STRICT"
DEVICE = "MINDSPEED_CHUNK_DEVICE"

# Every switch: its value, and the effect of that value.
VARIABLES: Mapping[str, tuple[str, str]] = {
    DISABLE: ("1", "the plugin is off"),
    DISPATCHER: (
        "host",
        "MindSpeed-MM's own `chunkmoe` runs, if it has one (its newest master); by default ours runs",
    ),
    CHUNK_MBS: ("host", "with `enable_chunk_mbs: true`, MindSpeed-MM's own ChunkMBS runs; by default ours runs"),
    STRICT: (
        "1",
        "`dispatcher: chunkmoe` with `expert_parallel_size: 1`, or ChunkMBS without recompute and offload, ends the "
        "run; by default it is a warning",
    ),
    DEVICE: ("cpu", "MindSpeed-MM runs on the CPU: the plugin adds what it lacks there"),
}


def disabled() -> bool:
    return os.environ.get(DISABLE) == "1"


def strict() -> bool:
    """Whether a warning at start becomes an error."""
    return os.environ.get(STRICT) == "1"


def on_cpu() -> bool:
    """Whether the host shall run on a CPU."""
    return os.environ.get(DEVICE) == "cpu"


def problems() -> list[str]:
    """One line for each switch that has no effect."""
    device = os.environ.get(DEVICE)
    return [f"{DEVICE}: {device}: has no effect; only cpu is known"] if device not in (None, "", "cpu") else []


def host_dispatcher_chosen() -> bool:
    """Whether a host that has its own `chunkmoe` must run that one."""
    return os.environ.get(DISPATCHER) == "host"


def host_chunk_mbs_chosen() -> bool:
    """Whether a host that has its own ChunkMBS must run that one."""
    return os.environ.get(CHUNK_MBS) == "host"


def section_mapping(section: Any) -> Mapping[str, Any]:
    """A section as a mapping, extra keys included: pydantic on 26.1 and later, a dataclass before."""
    if isinstance(section, Mapping):
        return section
    return section.model_dump() if hasattr(section, "model_dump") else _fields(section)


def value_at(arguments: object, path: str, default: Any = None) -> Any:
    """The value at a path of the yaml; `default` if there is none, or null."""
    section, *keys = path.split(".")
    value = _fields(arguments).get(section)
    for key in keys:
        value = section_mapping(value).get(key)
    return default if value is None else value


def _fields(section: object) -> dict[str, Any]:
    fields = getattr(section, "__dict__", {})
    return {**fields, **fields.get("_extra_fields", {})}  # those that 26.0 does not know, `features` among them


def plain_name(plan_class: type) -> str:
    """This host's name of its plain all-to-all."""
    names = typing.get_args(typing.get_type_hints(plan_class)["dispatcher"])
    return "alltoall" if "alltoall" in names else "fused"
