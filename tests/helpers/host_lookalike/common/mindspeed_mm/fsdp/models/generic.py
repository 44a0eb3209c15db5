"""Experts that have no `ep_forward`, as Qwen3-VL-MoE: the host gives them its generic one."""

from mindspeed_mm.fsdp.models.experts import Experts, SparseBlock


class GenericExperts(Experts):
    def forward(self, hidden_states, routing_weights, router_indices):
        return self.without_ranks(hidden_states, router_indices, routing_weights)


class GenericBlock(SparseBlock):
    experts_class = GenericExperts

    def call(self, x_TH, index_TK, weight_TK, probabilities_TE, seq_mask):
        return self.experts(x_TH[None], weight_TK, index_TK)
