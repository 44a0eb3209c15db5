"""Megatron's process groups, as far as experts go."""

import torch.distributed as dist

_groups = {}


def get_expert_model_parallel_group():
    if "ep" not in _groups:
        _groups["ep"] = dist.new_group()
    return _groups["ep"]
