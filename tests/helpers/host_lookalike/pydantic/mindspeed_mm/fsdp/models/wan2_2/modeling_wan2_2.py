"""Wan2.2: weights of all experts, and an activation handed over under a name that the host's function does not take."""

from mindspeed_mm.fsdp.distributed.expert_parallel.sharding import local
from mindspeed_mm.fsdp.models.experts import Experts, SparseBlock
from torch.nn.functional import gelu


class WanMoEExperts(Experts):
    def activation(self, fc1_RF):
        gate_RI, up_RI = fc1_RF.chunk(2, dim=-1)
        return up_RI * gelu(gate_RI, approximate="tanh")

    def forward(self, hidden_states, routing_weights, router_indices):
        return self.without_ranks(hidden_states, router_indices, routing_weights)

    def ep_forward(self, hidden_states, routing_weights, router_indices, ep_group, ep_plan):
        from mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher import ep_forward

        def _activation_fn(intermediate):
            gate, up = intermediate.chunk(2, dim=-1)
            return up * gelu(gate, approximate="tanh")

        out_TH = ep_forward(
            num_experts=self.num_experts,
            routing_weights=routing_weights,
            selected_experts=router_indices,
            hidden_states=hidden_states.reshape(-1, self.hidden_size),
            fc1_weight=local(self.gate_up_proj),
            fc2_weight=local(self.down_proj),
            ep_group=ep_group,
            fused=ep_plan.use_npu_fused_ops,
            activation_fn=_activation_fn,
        )
        return out_TH.view(hidden_states.shape[0], -1, self.hidden_size)


class WanSparseMoEBlock(SparseBlock):
    experts_class = WanMoEExperts

    def call(self, x_TH, index_TK, weight_TK, probabilities_TE, seq_mask):
        return self.experts(x_TH[None], probabilities_TE, index_TK)
