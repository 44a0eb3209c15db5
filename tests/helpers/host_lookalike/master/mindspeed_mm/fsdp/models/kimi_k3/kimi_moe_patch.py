"""Kimi-K3: its activation is a module."""

import torch
from mindspeed_mm.fsdp.distributed.expert_parallel.sharding import local
from mindspeed_mm.fsdp.models.experts import Experts, SparseBlock
from torch import nn


class SituAndMul(nn.Module):
    def forward(self, fc1_RF):
        gate_RI, up_RI = fc1_RF.chunk(2, dim=-1)
        return torch.tanh(gate_RI) * torch.sigmoid(gate_RI) * up_RI


class PatchKimiMoeExperts(Experts):
    def __init__(self, num_experts, hidden_size, intermediate_size):
        super().__init__(num_experts, hidden_size, intermediate_size)
        self.act_fn = SituAndMul()

    def activation(self, fc1_RF):
        return self.act_fn(fc1_RF)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return self.without_ranks(hidden_states, top_k_index, top_k_weights)

    def ep_forward(self, hidden_states, top_k_index, top_k_weights, ep_group, ep_plan):
        from mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher import (
            ep_allgather_forward,
            ep_forward,
            ep_mc2_forward,
        )

        dispatchers = {"alltoall": ep_forward, "mc2": ep_mc2_forward, "allgather": ep_allgather_forward}
        return dispatchers[ep_plan.dispatcher](
            self.num_experts,
            top_k_weights,
            top_k_index,
            hidden_states,
            fc1_weight=local(self.gate_up_proj),
            fc2_weight=local(self.down_proj),
            ep_group=ep_group,
            fused=ep_plan.use_npu_fused_ops,
            ep_balance_strategy=None,
            activation=self.act_fn,
        )


class PatchKimiSparseMoeBlock(SparseBlock):
    experts_class = PatchKimiMoeExperts

    def call(self, x_TH, index_TK, weight_TK, probabilities_TE, seq_mask):
        return self.experts(x_TH, index_TK, weight_TK)
