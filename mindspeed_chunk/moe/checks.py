"""Checks of a configuration with Chunk MoE, before a model is built and before ranks communicate.

Each function raises a ConfigError for one kind of mistake; the caller decides whether that ends a run. This module does
not import torch: the host's start, the embedded trainer and the command line all call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.names import read_patterns, shares
from mindspeed_chunk.values import Get

NAME = "chunkmoe"
EP_PLAN = "parallel.ep_plan"
DISPATCHER = f"{EP_PLAN}.dispatcher"
SIZE = "parallel.expert_parallel_size"
OP_REPLAY = "features.recompute_plan.op_replay_scopes"

# a shared expert is a plain module, which no dispatcher handles
_ROUTED_EXPERTS = re.compile(r"(^|\.)experts(\.|$)|gate_up_proj")


def check_names(apply_modules: Sequence[str] | None) -> None:
    if not apply_modules:
        raise ConfigError.about(
            f"{EP_PLAN}.apply_modules", apply_modules,
            "expert parallelism and chunkmoe need the modules that contain the experts",
            "for Qwen3.5-MoE: model.language_model.layers.{*}.mlp.experts",
        )  # fmt: skip


def check_exchange(size: int) -> None:
    """For a plan with chunkmoe."""
    if size == 1:
        rule = f"{DISPATCHER}: {NAME} has no effect, because MindSpeed-MM then calls no dispatcher"
        raise ConfigError.about(SIZE, size, rule, "set it to 2 or more")


def check_ranks(size: int, ranks: int) -> None:
    if ranks % size:
        raise ConfigError.about(SIZE, size, f"must divide the number of ranks, {ranks}", "change one of the two")


def check_experts(size: int, experts: int | None) -> None:
    """`experts`: the model's number of experts; None if it is not known."""
    if experts is not None and experts % size:
        rule = f"must divide the model's number of experts, {experts}"
        raise ConfigError.about(SIZE, size, rule, "change it, or the model")


def check_effect(keys: Iterable[str], dispatcher: str) -> None:
    """`keys`: those of Chunk MoE that the plan has."""
    keys = [f"{EP_PLAN}.{key}" for key in keys]
    if keys and dispatcher != NAME:
        message = f"{', '.join(keys)}: no effect while {DISPATCHER} is {dispatcher}; set it to {NAME}"
        raise ConfigError(message, keys[0])


def check_ep_balance(get: Get) -> None:
    if get("features.enable_ep_balance"):
        rule = "moves experts between ranks, which chunkmoe does not support"
        raise ConfigError.about("features.enable_ep_balance", True, rule, "use alltoall")


def check_op_replay(get: Get) -> None:
    """A recompute repeats a chunked layer with the plan of its forward, so it does not repeat all operations."""
    scopes, experts = get(OP_REPLAY), get(f"{EP_PLAN}.apply_modules") or []
    if not scopes or not get("features.recompute"):
        return
    layers = read_patterns(experts, f"{EP_PLAN}.apply_modules")
    for scope in scopes if isinstance(scopes, list) else [scopes]:
        names = scope.get("apply_modules", []) if isinstance(scope, Mapping) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError.about(OP_REPLAY, scope, "must be a scope with apply_modules", "give it a list of modules")
        wrong = [each.text for each in read_patterns(names, OP_REPLAY) if any(shares(each, one) for one in layers)]
        if wrong:
            layers_told = ", ".join(experts)
            rule = f"contains chunked layers ({layers_told}), whose recompute runs other operations than their forward"
            raise ConfigError.about(OP_REPLAY, wrong, rule, "name modules without them, or use alltoall")


def check_quantisation(get: Get) -> None:
    path = "training.quantization_plan.recipe_name"
    if get(path):
        rule = "chunkmoe would run plain grouped matmuls instead of quantised ones"
        raise ConfigError.about(path, get(path), rule, "use alltoall")


def check_lora(get: Get) -> None:
    path = "training.lora.target_modules"
    experts = [name for name in get(path) or [] if _ROUTED_EXPERTS.search(name)]
    if experts and get("training.lora.enable"):
        rule = "a dispatcher gets the plain weights of experts, so adapters on them would have no effect"
        raise ConfigError.about(path, experts, rule, "remove the experts from it")


# Features that Chunk MoE does not work with.
NEIGHBOURS = (check_ep_balance, check_op_replay, check_quantisation, check_lora)
