"""Qwen3.5-MoE: its `ep_forward` looks the dispatcher up in a dict at each call, and may leave padding out."""

import functools

from mindspeed_mm.fsdp.distributed.expert_parallel.sharding import local
from mindspeed_mm.fsdp.models.experts import Experts, SparseBlock


class Qwen3_5MoeExperts(Experts):
    skip_moe_pad_tokens = False

    def forward(self, hidden_states, top_k_index, top_k_weights, **kwargs):
        return self.without_ranks(hidden_states, top_k_index, top_k_weights)

    def dispatchers(self, ep_plan):
        from mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher import (
            ep_allgather_forward,
            ep_forward,
            ep_mc2_forward,
        )

        found = {"alltoall": ep_forward, "mc2": ep_mc2_forward, "allgather": ep_allgather_forward}
        if "moe_num_chunks" in type(ep_plan).model_fields:  # the newest version has a chunkmoe of its own
            from mindspeed_mm.fsdp.distributed.expert_parallel.ep_chunkmoe import ep_chunkmoe_forward

            found["chunkmoe"] = functools.partial(ep_chunkmoe_forward, ep_plan=ep_plan)
        return found

    def ep_forward(self, hidden_states, top_k_index, top_k_weights, ep_group, ep_plan, **kwargs):
        dispatchers = self.dispatchers(ep_plan)
        if ep_plan.dispatcher not in dispatchers:
            raise NotImplementedError(f"EP dispatcher {ep_plan.dispatcher} is not implemented for Qwen3.5 MoE.")
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
            seq_mask=kwargs.get("seq_mask"),
            skip_moe_pad_tokens=self.skip_moe_pad_tokens,
        )


class Qwen3_5MoeSparseMoeBlock(SparseBlock):
    experts_class = Qwen3_5MoeExperts

    def call(self, x_TH, index_TK, weight_TK, probabilities_TE, seq_mask):
        return self.experts(x_TH, index_TK, weight_TK, seq_mask=seq_mask)
