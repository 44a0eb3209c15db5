"""Qwen3.5 on Megatron: the function bound at import, a key and a group of its own, experts' weights flat."""

from megatron.core import mpu
from mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher import ep_forward, ep_mc2_forward


class MM_MoELayer:
    def __init__(self, config):
        if config.moe_token_dispatcher_type not in ["alltoall", "alltoall_mc2"]:
            raise ValueError(f"Unsupported token dispatcher type: {config.moe_token_dispatcher_type}")
        self.config = config

    def forward(self, hidden_states, routing_weights, selected_experts, weight1, weight2):
        config = self.config
        dispatch = ep_forward if config.moe_token_dispatcher_type == "alltoall" else ep_mc2_forward
        group = mpu.get_expert_model_parallel_group()
        local = config.num_moe_experts // group.size()
        fc1 = weight1.view(local, config.hidden_size, -1)
        fc2 = weight2.view(local, -1, config.hidden_size)
        return dispatch(
            config.num_moe_experts, routing_weights, selected_experts, hidden_states, fc1, fc2, group, fused=True
        )
