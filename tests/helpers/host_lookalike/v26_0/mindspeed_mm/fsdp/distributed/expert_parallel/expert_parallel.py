"""Binds experts to their ranks. Models see no plan here."""

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
            module.forward = partial(module.ep_forward, ep_group=ep_group)
        else:
            forward = get_experts_forward_fn_for_qwen(ep_group, dispatcher=plan.dispatcher)
            module.forward = types.MethodType(forward, module)
    return modules


def get_experts_forward_fn_for_qwen(ep_group, dispatcher="fused"):
    from .ep_dispatcher import ep_forward

    def experts_forward(self, hidden_states, routing_weights, router_indices):
        out_TH = ep_forward(
            self.num_experts,
            routing_weights,
            router_indices,
            hidden_states.reshape(-1, self.hidden_size),
            fc1_weight=local(self.gate_up_proj),
            fc2_weight=local(self.down_proj),
            ep_group=ep_group,
            fused=dispatcher != "eager",
        )
        return out_TH.view(hidden_states.shape[0], -1, self.hidden_size)

    return experts_forward
