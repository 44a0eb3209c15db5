"""What all versions' `expert_parallelize_modules` have in common: find the experts, shard them."""

import torch
from mindspeed_mm.fsdp.utils.str_match import module_name_match
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor


def find_experts(modules, plan):
    named = list(modules.named_modules())
    found = [module for pattern in plan.apply_modules for name, module in named if module_name_match(pattern, name)]
    if not found:
        raise RuntimeError(f"[Expert Parallel] No module named {plan} or not be ModuleList")
    return found


def shard_experts(module, ep_mesh):
    def shard(name, owner, mesh):
        for key, parameter in list(owner.named_parameters(recurse=False)):
            sharded = torch.nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]), parameter.requires_grad)
            owner.register_parameter(key, sharded)

    distribute_module(module, ep_mesh, partition_fn=shard)


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
