"""Sends `ep_forward` calls of groups with Chunk MoE to our dispatcher, and all other calls to the host's own code.

The function is replaced only when a plan turns Chunk MoE on: before that, a run executes none of our code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspeed_chunk.patches.record import Drifted, Patch, Seam, Undo, signature_of

_FIRST = (
    "num_experts",
    "routing_weights",
    "selected_experts",
    "hidden_states",
    "fc1_weight",
    "fc2_weight",
    "ep_group",
    "fused",
)
_OPTIONAL = {
    "swiglu_limit",
    "swiglu_alpha",
    "ep_balance_strategy",
    "skip_moe_pad_tokens",
    "seq_mask",
    "activation",
}
# these bind the function when they are imported
_SEAM = Seam("ep_forward", importers=("mindspeed_mm.mcore.models.qwen3_5.modules",))

_dispatchers: dict[Any, Callable] = {}


def check(module: ModuleType) -> Undo:
    """Check the signature and remember the module; change nothing yet."""
    names = tuple(inspect.signature(module.ep_forward).parameters)
    if names[: len(_FIRST)] != _FIRST or not set(names[len(_FIRST) :]) <= _OPTIONAL:
        raise Drifted(f"ep_forward{signature_of(module.ep_forward)}")
    _SEAM.bind(module)
    return _undo


def activate(group: Any, dispatcher: Callable) -> None:
    """From now on `ep_forward` calls with this group go to `dispatcher`, which takes the arguments by name."""
    _dispatchers[group] = dispatcher
    if not _SEAM.replaced:
        _SEAM.replace(_routed)


def _undo() -> None:
    _SEAM.forget()
    _dispatchers.clear()


def _routed(original: Callable) -> Callable:
    from mindspeed_chunk.device import untraced

    signature = inspect.signature(original)

    @untraced
    @functools.wraps(original)
    def ep_forward(*args: Any, **kwargs: Any) -> Any:
        activation = kwargs.pop("activation_fn", None)  # Wan2.2's name for it, which the host's function does not take
        named = signature.bind(*args, **kwargs).arguments
        dispatcher = _dispatchers.get(named.get("ep_group"))
        if dispatcher is None:
            return original(*args, **kwargs, **({} if activation is None else {"activation_fn": activation}))
        if activation is not None:
            named["activation"] = activation
        return dispatcher(**translate(_SEAM.owner, named))

    return ep_forward


def translate(module: ModuleType, named: dict[str, Any]) -> dict[str, Any]:
    """The host's arguments as ours: ids and weights in order, its activation as a callable, its forced balance."""
    from mindspeed_chunk.moe.arguments import order_routing

    named = dict(named)
    # the host's generic forward passes them in another order than transformers 5
    named["selected_experts"], named["routing_weights"] = order_routing(
        named["selected_experts"], named["routing_weights"]
    )
    alpha, limit = named.pop("swiglu_alpha", None), named.get("swiglu_limit") or 0.0
    named["swiglu_limit"] = limit
    if alpha is not None and named.get("activation") is None:
        # not plain SwiGLU: the host has the function
        named["swiglu_limit"] = 0.0
        named["activation"] = functools.partial(
            module.apply_activation, dim=-1, fused=named.get("fused", True), swiglu_limit=limit, swiglu_alpha=alpha
        )
    if getattr(module, "FORCE_EP_BALANCE", False):
        named["selected_experts"] = _balanced(module, named)
    return named


def _balanced(module: ModuleType, named: dict[str, Any]) -> Any:
    """MM_FORCE_EP_BALANCE: distributes tokens evenly over the experts, without padded tokens, which are not sent."""
    index = named["selected_experts"]
    if not named.get("skip_moe_pad_tokens"):
        return module.force_ep_balance(named["num_experts"], index)
    kept = named["seq_mask"].reshape(-1) != 0
    index = index.clone()
    index[kept] = module.force_ep_balance(named["num_experts"], index[kept])
    return index


PATCH = Patch(
    name="dispatcher",
    module="mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher",
    target="ep_forward",
    hosts="26.0.0, 26.1.0, master of 2026-08, newest master",
    expects=f"ep_forward({', '.join(_FIRST)}, and any of {', '.join(sorted(_OPTIONAL))})",
    why="every model's ep_forward ends there, with its expert-parallel group",
    until="the host has a registry of dispatchers",
    apply=check,
    enabled_by="dispatcher: chunkmoe",
)
