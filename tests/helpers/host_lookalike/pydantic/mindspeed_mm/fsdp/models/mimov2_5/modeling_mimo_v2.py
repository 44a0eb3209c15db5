"""MiMo-V2.5: its dispatchers are looked up once, and kept in the class."""

from mindspeed_mm.fsdp.distributed.expert_parallel.sharding import local
from mindspeed_mm.fsdp.models.experts import Experts, SparseBlock


class PatchMiMoV2NaiveMoe(Experts):
    _ep_dispatcher_dict = None

    @classmethod
    def _get_ep_dispatcher(cls):
        if cls._ep_dispatcher_dict is None:
            from mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher import (
                ep_allgather_forward,
                ep_forward,
                ep_mc2_forward,
            )

            cls._ep_dispatcher_dict = {
                "alltoall": ep_forward,
                "mc2": ep_mc2_forward,
                "allgather": ep_allgather_forward,
            }
        return cls._ep_dispatcher_dict

    def forward(self, hidden_states, top_k_weights, top_k_index):
        return self.without_ranks(hidden_states, top_k_index, top_k_weights)

    def ep_forward(self, hidden_states, top_k_weights, top_k_index, ep_group, ep_plan):
        return self._get_ep_dispatcher()[ep_plan.dispatcher](
            self.num_experts,
            top_k_weights,
            top_k_index,
            hidden_states,
            fc1_weight=local(self.gate_up_proj),
            fc2_weight=local(self.down_proj),
            ep_group=ep_group,
            fused=ep_plan.use_npu_fused_ops,
        )


class PatchMiMoV2MoE(SparseBlock):
    experts_class = PatchMiMoV2NaiveMoe

    def call(self, x_TH, index_TK, weight_TK, probabilities_TE, seq_mask):
        return self.experts(x_TH, weight_TK, index_TK)
