"""What a run asks for, read from the host's arguments whatever their kind, and from the environment."""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping

DISABLE = "MINDSPEED_CHUNK_DISABLE"
DISPATCHER = "MINDSPEED_CHUNK_DISPATCHER"
STRICT = "MINDSPEED_CHUNK_STRICT"
DEVICE = "MINDSPEED_CHUNK_DEVICE"


def disabled() -> bool:
    return os.environ.get(DISABLE) == "1"


def strict() -> bool:
    """Whether what would be a warning at start shall be an error."""
    return os.environ.get(STRICT) == "1"


def host_dispatcher_chosen() -> bool:
    """Whether a host with a `chunkmoe` of its own shall run that one."""
    return os.environ.get(DISPATCHER) == "host"


def plan_mapping(plan: object) -> Mapping[str, object]:
    """An `ep_plan` as a mapping, extra keys included: pydantic on 26.1 and later, a dataclass before."""
    return plan.model_dump() if hasattr(plan, "model_dump") else dict(vars(plan))


def plain_name(plan_class: type) -> str:
    """What this host calls its plain all-to-all."""
    names = typing.get_args(typing.get_type_hints(plan_class)["dispatcher"])
    return "alltoall" if "alltoall" in names else "fused"
