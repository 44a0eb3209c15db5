"""The dispatchers of this version but its own chunkmoe; an activation may have a slope of its own, `swiglu_alpha`."""

import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from mindspeed_mm import lookalike
from mindspeed_mm.fsdp.distributed.expert_parallel.balance import take_turns
from mindspeed_mm.fsdp.ops.eager import alltoall, swiglu, without_padding

FORCE_EP_BALANCE = int(os.getenv("MM_FORCE_EP_BALANCE", "0")) == 1


def force_ep_balance(num_experts: int, selected_experts: torch.Tensor) -> torch.Tensor:
    return take_turns(num_experts, selected_experts)


def apply_activation(
    intermediate_hidden_states: torch.Tensor,
    dim: int = -1,
    fused: bool = True,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    activation: Callable | None = None,
) -> torch.Tensor:
    if activation is not None:
        return activation(intermediate_hidden_states)
    if swiglu_alpha is None:
        return swiglu(intermediate_hidden_states, swiglu_limit or 0.0)
    gate, up = intermediate_hidden_states.chunk(2, dim=dim)
    return gate * torch.sigmoid(swiglu_alpha * gate) * (up + 1)


def _run(
    name,
    num_experts,
    routing_weights,
    selected_experts,
    hidden_states,
    fc1_weight,
    fc2_weight,
    ep_group=None,
    fused=True,
    swiglu_limit=None,
    swiglu_alpha=None,
    ep_balance_strategy=None,
    skip_moe_pad_tokens=False,
    seq_mask=None,
    activation=None,
):
    lookalike.note(name)
    activate = functools.partial(
        apply_activation, swiglu_limit=swiglu_limit, swiglu_alpha=swiglu_alpha, activation=activation
    )

    def forward(weight, index_TK, x_TH):
        if FORCE_EP_BALANCE:
            index_TK = force_ep_balance(num_experts, index_TK)
        return alltoall(num_experts, weight, index_TK, x_TH, fc1_weight, fc2_weight, ep_group, activate)

    x_TH = hidden_states.view(-1, hidden_states.shape[-1])
    return without_padding(skip_moe_pad_tokens, seq_mask, forward, routing_weights, selected_experts, x_TH)


def ep_forward(
    num_experts: int,
    routing_weights: torch.Tensor,
    selected_experts: torch.Tensor,
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    ep_group: dist.ProcessGroup | None = None,
    fused: bool = True,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    ep_balance_strategy=None,
    skip_moe_pad_tokens: bool = False,
    seq_mask: torch.Tensor | None = None,
    activation: Callable | None = None,
) -> torch.Tensor:
    return _run(
        "alltoall",
        num_experts,
        routing_weights,
        selected_experts,
        hidden_states,
        fc1_weight,
        fc2_weight,
        ep_group,
        fused,
        swiglu_limit,
        swiglu_alpha,
        ep_balance_strategy,
        skip_moe_pad_tokens,
        seq_mask,
        activation,
    )


def ep_mc2_forward(*args, **kwargs):
    return _run("mc2", *args, **kwargs)


def ep_allgather_forward(*args, **kwargs):
    return _run("allgather", *args, **kwargs)
