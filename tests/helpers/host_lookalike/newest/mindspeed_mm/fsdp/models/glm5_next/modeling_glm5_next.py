"""GLM5-next: routes within groups of experts, weights as transformers has them, `shared_experts`, a clamped SwiGLU.

It knows plain all-to-all alone, not the host's own chunkmoe.
"""

import torch
from mindspeed_mm.fsdp.distributed.expert_parallel.sharding import local
from mindspeed_mm.fsdp.models.experts import Experts, SparseBlock
from mindspeed_mm.fsdp.ops.eager import swiglu
from torch import nn

LIMIT, GROUPS, TOP_GROUPS, SCALE = 0.7, 4, 2, 2.5


class Glm5NextTextExperts(Experts):
    """gate_up_proj `[E, 2I, H]`, down_proj `[E, H, I]`."""

    def __init__(self, num_experts, hidden_size, intermediate_size):
        super().__init__(num_experts, hidden_size, intermediate_size)
        for name in ("gate_up_proj", "down_proj"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach().transpose(1, 2).contiguous()))

    def layout(self):
        return local(self.gate_up_proj).transpose(1, 2), local(self.down_proj).transpose(1, 2)

    def activation(self, fc1_RF):
        return swiglu(fc1_RF, LIMIT)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return self.without_ranks(hidden_states, top_k_index, top_k_weights)

    def ep_forward(self, hidden_states, top_k_index, top_k_weights, ep_group, ep_plan):
        from mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher import ep_forward

        if ep_plan.dispatcher != "alltoall":
            raise NotImplementedError(f"EP dispatcher {ep_plan.dispatcher} is not implemented for Glm5Next MoE.")
        fc1_weight, fc2_weight = self.layout()
        return ep_forward(
            self.num_experts,
            top_k_weights,
            top_k_index,
            hidden_states,
            fc1_weight=fc1_weight,
            fc2_weight=fc2_weight,
            ep_group=ep_group,
            fused=ep_plan.use_npu_fused_ops,
            swiglu_limit=LIMIT,
        )


class Glm5NextTextTopkRouter(nn.Module):
    """Takes the experts of a token out of the groups whose two best ones score highest."""

    def __init__(self, num_experts, hidden_size, top_k):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.weight = nn.Parameter(torch.randn(num_experts, hidden_size) * hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.linspace(-0.1, 0.1, num_experts))

    def forward(self, hidden_states):
        logits_TE = hidden_states @ self.weight.t()
        scores_TE = logits_TE.sigmoid()
        choice_TGM = (scores_TE.detach() + self.e_score_correction_bias).view(-1, GROUPS, self.num_experts // GROUPS)
        best_TG = choice_TGM.topk(2, -1).values.sum(-1).topk(TOP_GROUPS, -1).indices
        allowed_TG = torch.zeros(choice_TGM.shape[:2], dtype=torch.bool).scatter(1, best_TG, True)
        choice_TE = choice_TGM.masked_fill(~allowed_TG[..., None], float("-inf")).flatten(1)
        index_TK = choice_TE.topk(self.top_k, sorted=False).indices
        weight_TK = scores_TE.gather(1, index_TK)
        return logits_TE, weight_TK / weight_TK.sum(-1, keepdim=True) * SCALE, index_TK


class Glm5NextTextMoE(SparseBlock):
    experts_class = Glm5NextTextExperts

    def __init__(self, num_experts, hidden_size, intermediate_size, top_k):
        super().__init__(num_experts, hidden_size, intermediate_size, top_k)
        self.gate = Glm5NextTextTopkRouter(num_experts, hidden_size, top_k)
        self.shared_experts = nn.Linear(hidden_size, hidden_size, bias=False)

    def route(self, x_TH):
        logits_TE, weight_TK, index_TK = self.gate(x_TH)
        return weight_TK, index_TK, logits_TE

    def call(self, x_TH, index_TK, weight_TK, probabilities_TE, seq_mask):
        return self.experts(x_TH, index_TK, weight_TK) + self.shared_experts(x_TH)
