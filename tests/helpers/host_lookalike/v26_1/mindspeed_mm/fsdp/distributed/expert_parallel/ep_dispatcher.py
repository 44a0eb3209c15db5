"""The dispatchers of this version. mc2 and allgather compute the same here, and note that they ran."""

import functools
import os

import torch
import torch.distributed as dist
from mindspeed_mm import lookalike
from mindspeed_mm.fsdp.distributed.expert_parallel.balance import take_turns
from mindspeed_mm.fsdp.ops.eager import alltoall, swiglu

FORCE_EP_BALANCE = int(os.getenv("MM_FORCE_EP_BALANCE", "0")) == 1


def force_ep_balance(num_experts: int, selected_experts: torch.Tensor) -> torch.Tensor:
    return take_turns(num_experts, selected_experts)


def _run(
    name, num_experts, weight, index_TK, hidden_states, fc1, fc2, ep_group=None, fused=True, swiglu_limit=0.0, **kwargs
):
    lookalike.note(name)
    if FORCE_EP_BALANCE:
        index_TK = force_ep_balance(num_experts, index_TK)
    x_TH, activation = hidden_states.view(-1, hidden_states.shape[-1]), functools.partial(swiglu, limit=swiglu_limit)
    return alltoall(num_experts, weight, index_TK, x_TH, fc1, fc2, ep_group, activation)


def ep_forward(
    num_experts: int,
    routing_weights: torch.Tensor,
    selected_experts: torch.Tensor,
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    ep_group: dist.ProcessGroup | None = None,
    fused: bool = True,
    swiglu_limit: float = 0.0,
    ep_balance_strategy=None,
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
    )


def ep_mc2_forward(*args, fc1_weight, fc2_weight, **kwargs):
    return _run("mc2", *args, fc1_weight, fc2_weight, **kwargs)


def ep_allgather_forward(*args, fc1_weight, fc2_weight, **kwargs):
    return _run("allgather", *args, fc1_weight, fc2_weight, **kwargs)
