"""Binds experts to their ranks; the generic forward knows the host's own chunkmoe."""

import types
from functools import partial

import torch
from mindspeed_mm.fsdp.distributed.expert_parallel.sharding import find_experts, local, shard_experts
from mindspeed_mm.fsdp.params.parallel_args import EPPlanConfig
from torch.distributed import DeviceMesh


def expert_parallelize_modules(modules: torch.nn.Module, ep_mesh: DeviceMesh, plan: EPPlanConfig):
    ep_group = ep_mesh.get_group()
    for module in find_experts(modules, plan):
        shard_experts(module, ep_mesh)
        if callable(getattr(module, "ep_forward", None)):
            module.forward = partial(module.ep_forward, ep_group=ep_group, ep_plan=plan)
        else:
            forward = get_experts_forward_fn_for_qwen(
                ep_group, use_npu_fused_ops=plan.use_npu_fused_ops, dispatcher=plan.dispatcher, plan=plan
            )
            module.forward = types.MethodType(forward, module)
    return modules


def get_experts_forward_fn_for_qwen(ep_group, use_npu_fused_ops=True, dispatcher="alltoall", plan=None):
    from .ep_chunkmoe import ep_chunkmoe_forward
    from .ep_dispatcher import ep_allgather_forward, ep_forward, ep_mc2_forward

    dispatchers = {
        "alltoall": ep_forward,
        "mc2": ep_mc2_forward,
        "allgather": ep_allgather_forward,
        "chunkmoe": partial(ep_chunkmoe_forward, ep_plan=plan),
    }

    def experts_forward(self, hidden_states, routing_weights, router_indices):
        out_TH = dispatchers[dispatcher](
            self.num_experts,
            routing_weights,
            router_indices,
            hidden_states.reshape(-1, self.hidden_size),
            fc1_weight=local(self.gate_up_proj),
            fc2_weight=local(self.down_proj),
            ep_group=ep_group,
            fused=use_npu_fused_ops,
        )
        return out_TH.view(hidden_states.shape[0], -1, self.hidden_size)

    return experts_forward
