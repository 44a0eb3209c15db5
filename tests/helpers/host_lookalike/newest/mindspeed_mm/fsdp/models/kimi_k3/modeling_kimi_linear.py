"""Kimi-K3's decoder layer: beside the hidden states it hands on what layers before it have summed up, a row a token."""

import torch
from mindspeed_mm.fsdp.models.kimi_k3.kimi_moe_patch import PatchKimiSparseMoeBlock
from torch import nn


class KimiDecoderLayer(nn.Module):
    attn_res_block_size = 2

    def __init__(self, num_experts, hidden_size, intermediate_size, top_k, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_res_proj = nn.Linear(hidden_size, 1, bias=False)
        self.block_sparse_moe = PatchKimiSparseMoeBlock(num_experts, hidden_size, intermediate_size, top_k)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        output_attentions=False,
        use_cache=False,
        block_residual=None,
        **kwargs,
    ):
        rows_TH = hidden_states.view(-1, hidden_states.shape[-1])
        if self.layer_idx % self.attn_res_block_size == 0:
            block_residual = torch.cat([block_residual, rows_TH[:, None]], 1)
        seen = hidden_states if attention_mask is None else hidden_states * attention_mask[..., None]
        prefix_sum = hidden_states + self.self_attn(seen.cumsum(1)).tanh()
        sums_TNH = torch.cat([block_residual, prefix_sum.view(rows_TH.shape)[:, None]], 1)
        mixed_TH = (self.mlp_res_proj(sums_TNH).softmax(1) * sums_TNH).sum(1)
        return prefix_sum + self.block_sparse_moe(mixed_TH.view_as(hidden_states)), block_residual
