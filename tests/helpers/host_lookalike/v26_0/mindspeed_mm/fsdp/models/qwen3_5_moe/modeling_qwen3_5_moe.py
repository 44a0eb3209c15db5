"""Qwen3.5-MoE: its `ep_forward` imports the dispatcher at each call."""

from mindspeed_mm.fsdp.distributed.expert_parallel.sharding import local
from mindspeed_mm.fsdp.models.experts import Experts, SparseBlock


class Qwen3_5MoeExperts(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return self.without_ranks(hidden_states, top_k_index, top_k_weights)

    def ep_forward(self, hidden_states, top_k_index, top_k_weights, ep_group):
        from mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher import ep_forward

        return ep_forward(
            self.num_experts,
            top_k_weights,
            top_k_index,
            hidden_states,
            fc1_weight=local(self.gate_up_proj),
            fc2_weight=local(self.down_proj),
            ep_group=ep_group,
        )


class Qwen3_5MoeSparseMoeBlock(SparseBlock):
    experts_class = Qwen3_5MoeExperts

    def call(self, x_TH, index_TK, weight_TK, probabilities_TE, seq_mask):
        return self.experts(x_TH, index_TK, weight_TK)
