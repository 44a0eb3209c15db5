"""Admits `dispatcher: chunkmoe` to the yaml, which the host validates before any plugin of the yaml is imported."""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from types import ModuleType
from typing import Any

from mindspeed_chunk.moe.checks import NAME
from mindspeed_chunk.patches.record import Drifted, NotNeeded, Patch, Undo

_ROOT = "mindspeed_mm.fsdp.params.argument"


def apply(module: ModuleType) -> Undo:
    plan_class = module.EPPlanConfig
    names = typing.get_args(typing.get_type_hints(plan_class).get("dispatcher"))
    if not {"alltoall", "fused"} & set(names):
        raise Drifted(f"{plan_class.__name__}.dispatcher of {names or 'no Literal'}")
    if NAME in names:
        raise NotNeeded("the host has a dispatcher of this name")
    if dataclasses.is_dataclass(plan_class) and not hasattr(plan_class, "model_fields"):
        return _admit_extra_keys(plan_class)
    return _widen(module, plan_class, names)


def _widen(module: ModuleType, plan_class: Any, names: tuple[str, ...]) -> Undo:
    """pydantic (26.1 and later): extra keys are kept, the dispatcher's name is checked."""

    def set_names(to: tuple[str, ...]) -> None:
        plan_class.__annotations__["dispatcher"] = typing.Literal[to]
        plan_class.model_fields["dispatcher"].annotation = typing.Literal[to]
        # models that contain the plan have compiled its schema into their own; the root may not exist yet
        for model in (plan_class, module.ParallelArguments, getattr(sys.modules.get(_ROOT), "Arguments", None)):
            if model is not None:
                model.model_rebuild(force=True)

    set_names((*names, NAME))
    return lambda: set_names(names)


def _admit_extra_keys(plan_class: Any) -> Undo:
    """dataclasses (26.0): names are not checked, but unknown keys raise TypeError; a host function allows them."""
    from mindspeed_mm.fsdp.params.utils import allow_extra_fields

    original = plan_class.__init__
    allow_extra_fields(plan_class)
    admitting = plan_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # with any other plan, the host still refuses keys that it does not know
        (admitting if kwargs.get("dispatcher") == NAME else original)(self, *args, **kwargs)

    plan_class.__init__ = __init__

    def undo() -> None:
        plan_class.__init__ = original

    return undo


PATCH = Patch(
    name="config name",
    module="mindspeed_mm.fsdp.params.parallel_args",
    target="EPPlanConfig.dispatcher",
    hosts="26.0.0, 26.1.0, master of 2026-08",
    expects="a Literal with alltoall (26.1 and later) or fused (26.0)",
    why="the yaml is validated before plugins are imported",
    until="the oldest supported host has the name",
    apply=apply,
)
