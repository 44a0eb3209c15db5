"""`MM_FORCE_EP_BALANCE=1`: tokens take turns over the experts, whatever the router says. Not in 26.0."""

import torch


def take_turns(num_experts, selected_experts):
    turns = torch.arange(selected_experts.numel(), dtype=selected_experts.dtype) % num_experts
    return turns.view_as(selected_experts)
