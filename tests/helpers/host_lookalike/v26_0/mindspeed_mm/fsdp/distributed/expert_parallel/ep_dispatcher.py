"""The one dispatcher of this version."""

import torch
import torch.distributed as dist
from mindspeed_mm import lookalike
from mindspeed_mm.fsdp.ops.eager import alltoall, swiglu


def ep_forward(
    num_experts: int,
    routing_weights: torch.Tensor,
    selected_experts: torch.Tensor,
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    ep_group: dist.ProcessGroup | None = None,
    fused: bool = True,
) -> torch.Tensor:
    lookalike.note("alltoall")
    x_TH = hidden_states.view(-1, hidden_states.shape[-1])
    return alltoall(num_experts, routing_weights, selected_experts, x_TH, fc1_weight, fc2_weight, ep_group, swiglu)
