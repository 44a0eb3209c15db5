"""A chunkmoe of the host's own. The real one overlaps pairs of chunks; this one runs them one by one.

As the real one it takes no notice of `skip_moe_pad_tokens` and of EP balance.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from mindspeed_mm import lookalike
from mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher import apply_activation
from mindspeed_mm.fsdp.ops.eager import alltoall
from mindspeed_mm.fsdp.params.parallel_args import EPPlanConfig


def batched_pre_dispatch_metadata(
    chunk_se_list: list[torch.Tensor],
    num_global_experts: int,
    ep_group: dist.ProcessGroup | None = None,
):
    raise NotImplementedError("nobody needs the look-alike's")


def ep_chunkmoe_forward(
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
    ep_plan: EPPlanConfig | None = None,
) -> torch.Tensor:
    lookalike.note("native chunkmoe")
    x_TH = hidden_states.view(-1, hidden_states.shape[-1])
    tokens = x_TH.shape[0]
    count = ep_plan.moe_num_chunks or -(-tokens // (ep_plan.moe_chunk_size or tokens))
    activate = functools.partial(
        apply_activation, swiglu_limit=swiglu_limit, swiglu_alpha=swiglu_alpha, activation=activation
    )
    size, weights = -(-tokens // count), (fc1_weight, fc2_weight)
    chunks = zip(routing_weights.split(size), selected_experts.split(size), x_TH.split(size))
    return torch.cat([alltoall(num_experts, *chunk, *weights, ep_group, activate) for chunk in chunks])
