"""Compares the configurations of all ranks after the process group is made, before the host makes its first group.

Ranks that differ would make different collectives and hang. A run with none of our features only writes its settings
to the store, in a few messages, for ranks that may read them; it does not wait.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.log import logger
from mindspeed_chunk.mbs import checks as mbs_checks
from mindspeed_chunk.moe import checks as moe_checks
from mindspeed_chunk.patches import settings
from mindspeed_chunk.patches.record import Drifted, Patch, Seam, Undo

_NAME = "init_parallel_state"
_SEAM = Seam(_NAME, importers=("mindspeed_mm.fsdp.train.trainer", "mindspeed_mm.fsdp.inference.inference_runner"))
_FEATURES = ("recompute", "offload", "chunk_mbs", "chunkmbs")
_TRAINING = ("micro_batch_size", "val_micro_batch_size", "gradient_accumulation_steps")

_arguments: Any = None
_group: weakref.ref | None = None  # the default process group whose ranks were compared


def remember_arguments(arguments: Any) -> None:
    """Keep the host's arguments until the process group is made."""
    global _arguments
    _arguments = arguments


def apply(module: Any) -> Undo:
    if not callable(getattr(module, _NAME, None)):
        raise Drifted(f"no {_NAME}")
    _SEAM.bind(module)
    _SEAM.replace(_after_comparison)
    return _undo


def _undo() -> None:
    global _arguments, _group
    _SEAM.forget()
    _arguments = _group = None


def _after_comparison(original: Callable) -> Callable:
    @functools.wraps(original)
    def init_parallel_state(*args: Any, **kwargs: Any) -> Any:
        _compare()
        return original(*args, **kwargs)

    return init_parallel_state


def _compare() -> None:
    """Once per default process group: the host may initialise its state again on only some ranks."""
    global _group
    import torch.distributed as dist

    if _arguments is None or not dist.is_initialized() or _group and _group() is dist.group.WORLD:
        return
    enabled = False
    try:
        from mindspeed_chunk import consistency

        _group = weakref.ref(dist.group.WORLD)
        enabled = _enabled(_arguments)
        consistency.check(_resolved(_arguments), wait=enabled)
    except ConfigError as error:
        raise SystemExit(f"mindspeed_chunk: {error}") from None
    except Exception as error:  # a store may raise anything; if it is broken, the host's first group fails
        level = logging.WARNING if enabled else logging.DEBUG
        logger.log(level, f"mindspeed_chunk: configurations were not compared: {type(error).__name__}: {error}")


def _enabled(arguments: Any) -> bool:
    """Whether a feature of ours will run, and not the host's own of the same name."""
    chunk_mbs = settings.value_at(arguments, mbs_checks.ENABLE) is True
    return (
        arguments.parallel.ep_plan.dispatcher == moe_checks.NAME
        and not settings.host_dispatcher_chosen()
        or chunk_mbs
        and not settings.host_chunk_mbs_chosen()
    )


def _resolved(arguments: Any) -> dict[str, Any]:
    """The settings that determine collectives and their sizes, by the keys of the yaml.

    It contains nothing that may differ between the machines of a run: no path, no log setting, no rank.
    """
    from mindspeed_chunk.consistency import flatten

    features = settings.section_mapping(settings.value_at(arguments, "features"))
    features = {key: value for key, value in features.items() if any(part in key for part in _FEATURES)}
    offload = getattr(arguments.model, "_extra_fields", {}).get("activation_offload_plan")  # where 26.0 has it
    values = {
        **flatten(arguments.parallel, "parallel"),
        **flatten(features, "features"),
        **flatten(offload, "model.activation_offload_plan"),
        **{f"training.{name}": getattr(arguments.training, name, None) for name in _TRAINING},
    }
    parts = {key: key.split(".") for key in values}
    for key, names in parts.items():
        if names[-1].endswith("_rank") or any(name.startswith("_") for name in names):
            del values[key]
    for section, config in ((moe_checks.EP_PLAN, ChunkMoEConfig), (mbs_checks.MBS_PLAN, ChunkMBSConfig)):
        for field in dataclasses.fields(config):  # no version of the host has all of our keys
            if values.get(key := f"{section}.{field.name}") is None:
                values[key] = list(field.default) if isinstance(field.default, tuple) else field.default
    if arguments.parallel.ep_plan.dispatcher == moe_checks.NAME:
        values[settings.DISPATCHER] = settings.host_dispatcher_chosen()
    if features.get("enable_chunk_mbs"):
        values[settings.CHUNK_MBS] = settings.host_chunk_mbs_chosen()
    return values


PATCH = Patch(
    name="parallel state",
    module="mindspeed_mm.fsdp.distributed.parallel_state",
    target=_NAME,
    hosts="26.0.0, 26.1.0, master of 2026-08, newest master",
    expects=f"{_NAME}, called between init_process_group and the first group of the host",
    why="ranks with different yamls would hang in their first steps",
    until="the host compares them",
    apply=apply,
)
