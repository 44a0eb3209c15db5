"""What the models' MoE layers have in common: stacked weights, the forward without ranks, a router in front."""

import torch
from mindspeed_mm.fsdp.ops.eager import swiglu
from torch import nn


class Experts(nn.Module):
    """gate_up_proj `[E, H, 2I]`, down_proj `[E, I, H]`."""

    def __init__(self, num_experts, hidden_size, intermediate_size):
        super().__init__()
        self.num_experts, self.hidden_size = num_experts, hidden_size
        scale = hidden_size**-0.5
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, hidden_size, 2 * intermediate_size) * scale)
        self.down_proj = nn.Parameter(torch.randn(num_experts, intermediate_size, hidden_size) * scale)

    def layout(self):
        """The weights as the rows are multiplied by them."""
        return self.gate_up_proj, self.down_proj

    def activation(self, fc1_RF):
        return swiglu(fc1_RF)

    def without_ranks(self, hidden_states, index_TK, weights):
        """All experts here, one token after the other; `weights` is `[T, K]` or `[T, E]`."""
        if weights.shape != index_TK.shape:
            weights = weights.gather(1, index_TK)
        shape, x_TH = hidden_states.shape, hidden_states.reshape(-1, self.hidden_size)
        out_TH, (fc1_EHF, fc2_EIH) = torch.zeros_like(x_TH), self.layout()
        for expert in range(self.num_experts):
            token, place = (index_TK == expert).nonzero(as_tuple=True)
            rows = self.activation(x_TH[token] @ fc1_EHF[expert]) @ fc2_EIH[expert]
            out_TH = out_TH.index_add(0, token, rows * weights[token, place, None])
        return out_TH.view(shape)


class SparseBlock(nn.Module):
    """Router and experts; `call` says in which order a model hands its experts their arguments, and what it adds."""

    experts_class = Experts

    def __init__(self, num_experts, hidden_size, intermediate_size, top_k):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = self.experts_class(num_experts, hidden_size, intermediate_size)

    def route(self, x_TH):
        probabilities_TE = self.gate(x_TH).softmax(-1)
        return *probabilities_TE.topk(self.top_k), probabilities_TE

    def call(self, x_TH, index_TK, weight_TK, probabilities_TE, seq_mask):
        raise NotImplementedError

    def forward(self, hidden_states, seq_mask=None):
        """`[B, S, H]` to `[B, S, H]`."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        weight_TK, index_TK, probabilities_TE = self.route(x_TH)
        out = self.call(x_TH, index_TK, weight_TK, probabilities_TE, seq_mask)
        return out.reshape(hidden_states.shape)
