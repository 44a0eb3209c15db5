"""Qwen3.5's MoE block with its shared expert where it hides communication: between the two nodes of the layer call.

In transformers and MindSpeed-MM, the block computes the shared expert before its router. The sum is the same, but the
order in which gradients of the block's input are added is not.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.moe.filler import Filler

_CHILDREN = {"gate", "experts", "shared_expert", "shared_expert_gate"}
# all names in the forward of such a block except its variables, in their order, in every known version
_NAMES = tuple("shape view shared_expert gate experts F sigmoid shared_expert_gate reshape".split())
_PATH = "parallel.ep_plan.chunk_moe_overlap_shared_expert"


def overlap_shared_expert(model: nn.Module) -> None:
    """Give every MoE block of `model` that has a shared expert a forward that overlaps it.

    Raises:
        ConfigError: if there is no such block, or if one computes something other than `_forward`.
    """
    blocks = {name: block for name, block in model.named_modules() if _CHILDREN <= dict(block.named_children()).keys()}
    if not blocks:
        rule = f"no block of the model has {', '.join(sorted(_CHILDREN))}"
        raise ConfigError.about(_PATH, True, rule, "remove the key")
    for name, block in blocks.items():
        problem = _problem(block)
        if problem:
            raise ConfigError.about(_PATH, True, f"{name}: {problem}", "remove the key")
    for block in blocks.values():
        block.forward = types.MethodType(_forward, block)


def _problem(block: nn.Module) -> str | None:
    if "forward" in vars(block):
        return "its forward has been replaced"
    forward = inspect.unwrap(type(block).forward)
    names = forward.__code__.co_names
    if names == _NAMES:
        return None
    differing = sorted(set(names) ^ set(_NAMES)) or ["the order of its operations"]
    return f"its forward is not the known one: it differs in {', '.join(differing)}"


def _forward(self: Any, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
    flat_TH = hidden_states.view(-1, hidden_states.shape[-1])
    _, weight_TK, index_TK = self.gate(flat_TH)
    shared = Filler(lambda: F.sigmoid(self.shared_expert_gate(flat_TH)) * self.shared_expert(flat_TH))
    with shared:
        routed_TH = self.experts(flat_TH, index_TK, weight_TK, **kwargs)
    return (routed_TH + shared.result()).reshape(hidden_states.shape)
