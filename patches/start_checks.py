"""Checks a configuration that asks for Chunk MoE or ChunkMBS as soon as the host has read it, before any collective."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import re
from pathlib import Path
from types import ModuleType

from mindspeed_chunk.config import ChunkMoEConfig, ConfigError
from mindspeed_chunk.patches import config_name, ep_dispatcher, expert_parallel, mbs_checks, settings
from mindspeed_chunk.patches.config_name import NAME
from mindspeed_chunk.patches.record import APPLIED, Drifted, Patch, Undo, log_once, signature_of

# a shared expert is a plain module, and none of a dispatcher's business
_ROUTED_EXPERTS = re.compile(r"(^|\.)experts(\.|$)|gate_up_proj")


def apply(module: ModuleType) -> Undo:
    if hasattr(module.Arguments, "model_post_init"):
        return _wrap(module.Arguments, "model_post_init", after=lambda arguments, result: check(arguments))
    if hasattr(module, "parse_args"):
        return _wrap(module, "parse_args", after=lambda arguments, result: check(result))
    raise Drifted(f"neither Arguments.model_post_init nor parse_args{signature_of(module.Arguments)}")


def _wrap(owner: object, name: str, after) -> Undo:
    original = getattr(owner, name)

    @functools.wraps(original)
    def checked(first, *args, **kwargs):
        result = original(first, *args, **kwargs)
        try:
            after(first, result)
        except ConfigError as error:
            # past the host's own handlers, which would bury it under two tracebacks
            raise SystemExit(f"mindspeed_chunk: {error}") from None
        return result

    setattr(owner, name, checked)
    return lambda: setattr(owner, name, original)


def check(arguments: object) -> None:
    """Raises ConfigError. Does nothing for a configuration that asks for neither."""
    _check_chunk_moe(arguments)
    mbs_checks.check(arguments)


def _check_chunk_moe(arguments: object) -> None:
    parallel = arguments.parallel
    plan = parallel.ep_plan
    if plan.dispatcher != NAME:
        return
    if settings.host_dispatcher_chosen():
        if config_name.PATCH.state == APPLIED:  # the name is ours, so the host has nothing behind it
            raise ConfigError.about(settings.DISPATCHER, "host", "this host has no chunkmoe of its own", "unset it")
        return
    path = "parallel.ep_plan"
    config = ChunkMoEConfig.from_mapping(settings.plan_mapping(plan), path)
    _check_seams()
    _check_back_end(config.chunk_moe_backend, path)
    _check_neighbours(arguments)
    if not plan.apply_modules:
        raise ConfigError.about(
            f"{path}.apply_modules", plan.apply_modules, "chunkmoe needs the names of the experts", "name them"
        )
    size = parallel.expert_parallel_size
    if size == 1:
        rule = f"{path}.dispatcher: {NAME} has no effect, since MindSpeed-MM then reaches no dispatcher"
        error = ConfigError.about("parallel.expert_parallel_size", size, rule, "set it to 2 or more")
        if settings.strict():
            raise error
        log_once(logging.WARNING, f"mindspeed_chunk: {error}")
    ranks = int(os.environ.get("WORLD_SIZE", size))
    if ranks % size:
        rule = f"must divide the number of ranks, {ranks}"
        raise ConfigError.about("parallel.expert_parallel_size", size, rule, "change one of the two")
    experts = _num_experts(arguments)
    if experts is not None and experts % size:
        rule = f"must divide the model's number of experts, {experts}"
        raise ConfigError.about("parallel.expert_parallel_size", size, rule, "change it")


def _check_seams() -> None:
    """The host's modules behind Chunk MoE are imported and looked at now, not in the middle of a run."""
    for patch in (ep_dispatcher.PATCH, expert_parallel.PATCH):
        importlib.import_module(patch.module)
        if patch.state != APPLIED:
            raise ConfigError(f"parallel.ep_plan.dispatcher: {NAME}: {patch}; use dispatcher: alltoall")


def _check_back_end(name: str, path: str) -> None:
    import torch

    from mindspeed_chunk import ops

    device_type = importlib.import_module("mindspeed_mm.fsdp.utils.device").get_device_type()
    try:
        ops.resolve(name, torch.device(device_type))
    except ValueError as error:
        raise ConfigError(f"{path}.{error}") from None


def _check_neighbours(arguments: object) -> None:
    """Features that Chunk MoE does not work with, by the key that turns them on."""
    features, training = getattr(arguments, "features", None), arguments.training  # 26.0 has no features
    if getattr(features, "enable_ep_balance", False):
        raise ConfigError.about(
            "features.enable_ep_balance", True, "moves experts between ranks, which chunkmoe does not", "use alltoall"
        )
    recipe = getattr(getattr(training, "quantization_plan", None), "recipe_name", None)
    if recipe:
        rule = "quantised grouped matmuls are the host's own, and chunkmoe would run plain ones"
        raise ConfigError.about("training.quantization_plan.recipe_name", recipe, rule, "use alltoall")
    lora = getattr(training, "lora", None)
    if getattr(lora, "enable", False):
        targets = [name for name in lora.target_modules if _ROUTED_EXPERTS.search(name)]
        if targets:
            rule = "adapters on experts are not seen by a dispatcher, which is handed the plain weights"
            raise ConfigError.about("training.lora.target_modules", targets, rule, "leave the experts out")


def _num_experts(arguments: object) -> int | None:
    """The model's number of experts, where its folder says so."""
    folder = getattr(arguments.model, "model_name_or_path", None)
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (TypeError, OSError, ValueError):
        return None
    config = config.get("text_config", config)
    return next((config[key] for key in ("num_experts", "n_routed_experts") if key in config), None)


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
