"""Checks a configuration with Chunk MoE or ChunkMBS as soon as the host has read it, before any collective."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspeed_chunk import model_config
from mindspeed_chunk.config import ChunkMoEConfig, ConfigError
from mindspeed_chunk.log import say
from mindspeed_chunk.moe import checks
from mindspeed_chunk.moe.checks import NAME
from mindspeed_chunk.patches import config_name, ep_dispatcher, expert_parallel, mbs_checks, parallel_state, settings
from mindspeed_chunk.patches.record import APPLIED, Drifted, Patch, Undo, signature_of


def apply(module: ModuleType) -> Undo:
    if hasattr(module.Arguments, "model_post_init"):
        return _wrap(module.Arguments, "model_post_init", after=lambda arguments, result: _look(arguments))
    if hasattr(module, "parse_args"):
        return _wrap(module, "parse_args", after=lambda arguments, result: _look(result))
    raise Drifted(f"neither Arguments.model_post_init nor parse_args{signature_of(module.Arguments)}")


def _wrap(owner: object, name: str, after: Callable[[Any, Any], None]) -> Undo:
    original = getattr(owner, name)

    @functools.wraps(original)
    def checked(first: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(first, *args, **kwargs)
        try:
            after(first, result)
        except ConfigError as error:
            # not a ConfigError: the host's handlers would hide it under two tracebacks
            raise SystemExit(f"mindspeed_chunk: {error}") from None
        return result

    setattr(owner, name, checked)
    return lambda: setattr(owner, name, original)


def _look(arguments: Any) -> None:
    check(arguments)
    parallel_state.remember_arguments(arguments)


def check(arguments: Any) -> None:
    """Raises ConfigError. Does nothing for a configuration with neither feature."""
    _check_chunk_moe(arguments)
    mbs_checks.check(arguments)


def _check_chunk_moe(arguments: Any) -> None:
    parallel = arguments.parallel
    ep_plan = parallel.ep_plan
    if ep_plan.dispatcher != NAME:
        return
    if settings.host_dispatcher_chosen():
        if config_name.PATCH.state == APPLIED:  # the name is ours, so the host has no such dispatcher
            raise ConfigError.about(settings.DISPATCHER, "host", "this host does not have its own chunkmoe", "unset it")
        return
    config = ChunkMoEConfig.from_mapping(settings.section_mapping(ep_plan), checks.EP_PLAN)
    _check_seams()
    _check_back_end(config.chunk_moe_backend)
    for check_neighbour in checks.NEIGHBOURS:
        check_neighbour(functools.partial(settings.value_at, arguments))
    checks.check_names(ep_plan.apply_modules)
    size = parallel.expert_parallel_size
    try:
        checks.check_exchange(size)
    except ConfigError as error:
        if settings.strict():
            raise
        say(logging.WARNING, str(error))
    checks.check_ranks(size, int(os.environ.get("WORLD_SIZE", size)))
    folder = getattr(arguments.model, "model_name_or_path", None)
    checks.check_experts(size, model_config.num_experts(model_config.read_text_config(folder)))


def _check_seams() -> None:
    """Import and check the host's modules for Chunk MoE now, not in the middle of a run."""
    for patch in (ep_dispatcher.PATCH, expert_parallel.PATCH):
        importlib.import_module(patch.module)
        if patch.state != APPLIED:
            raise ConfigError(f"{checks.DISPATCHER}: {NAME}: {patch}; use dispatcher: alltoall")


def _check_back_end(name: str) -> None:
    import torch

    from mindspeed_chunk import ops

    device_type = importlib.import_module("mindspeed_mm.fsdp.utils.device").get_device_type()
    try:
        ops.resolve(name, torch.device(device_type))
    except ValueError as error:
        raise ConfigError(f"{checks.EP_PLAN}.{error}") from None


PATCH = Patch(
    name="start checks",
    module="mindspeed_mm.fsdp.params.argument",
    target="Arguments.model_post_init",
    hosts="26.0.0 (parse_args), 26.1.0, master of 2026-08, newest master",
    expects="Arguments.model_post_init (26.1 and later) or parse_args(dataclass_type) (26.0)",
    why="a wrong key must end the run before the first collective, in one line",
    until="never: it is ours",
    apply=apply,
)
