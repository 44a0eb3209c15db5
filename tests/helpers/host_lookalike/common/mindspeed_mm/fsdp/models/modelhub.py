"""Builds the tiny model that a folder's config.json describes."""

import contextlib
import importlib
import json
from pathlib import Path

import torch
from torch import nn

# kind: module, block, and where the block's experts stand
BLOCKS = {
    "qwen3_5_moe": ("mindspeed_mm.fsdp.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock"),
    "generic": ("mindspeed_mm.fsdp.models.generic", "GenericBlock"),
    "mimov2_5": ("mindspeed_mm.fsdp.models.mimov2_5.modeling_mimo_v2", "PatchMiMoV2MoE"),
    "wan2_2": ("mindspeed_mm.fsdp.models.wan2_2.modeling_wan2_2", "WanSparseMoEBlock"),
    "glm5_next": ("mindspeed_mm.fsdp.models.glm5_next.modeling_glm5_next", "Glm5NextTextMoE"),
    "kimi_k3": ("mindspeed_mm.fsdp.models.kimi_k3.kimi_moe_patch", "PatchKimiSparseMoeBlock"),
}


def block_class(kind):
    module, name = BLOCKS[kind]
    return getattr(importlib.import_module(module), name)


class TinyModel(nn.Module):
    """Embedding, MoE layers with a residual, head."""

    def __init__(self, config):
        super().__init__()
        kind, sizes = block_class(config["model_type"]), config["text_config"]
        hidden = sizes["hidden_size"]
        block = sizes["num_experts"], hidden, sizes["moe_intermediate_size"], sizes["num_experts_per_tok"]
        self.embed = nn.Embedding(sizes["vocab_size"], hidden)
        self.layers = nn.ModuleList(kind(*block) for _ in range(sizes["num_hidden_layers"]))
        self.lm_head = nn.Linear(hidden, sizes["vocab_size"], bias=False)
        self.coefficient, self.hooked, self.router_logits = 0.0, [], []

    def forward(self, tokens, seq_mask=None):
        hidden_states = self.embed(tokens)
        with self.recording():
            for layer in self.layers:
                hidden_states = hidden_states + layer(hidden_states, seq_mask=seq_mask)
        return self.lm_head(hidden_states)

    @contextlib.contextmanager
    def recording(self):
        """Router logits by transformers' own means, if they have a loss."""
        self.router_logits = []
        if not self.coefficient:
            yield
            return
        from transformers.utils.output_capturing import _active_collector

        def record(gate, args, output):
            collected = _active_collector.get()
            if collected is not None:  # there is none during a recompute
                collected["router_logits"].append(output)

        if not self.hooked:
            self.hooked = [layer.gate.register_forward_hook(record) for layer in self.layers]
        before = _active_collector.set({"router_logits": self.router_logits})
        yield
        _active_collector.reset(before)

    def auxiliary_loss(self, mask):
        """Not linear in the tokens: a mean of the micro-chunks' values would be another number."""
        weight_T = mask.flatten() / mask.sum()
        means = [(weight_T[:, None] * logits_TE.softmax(-1)).sum(0) for logits_TE in self.router_logits]
        return self.coefficient * sum((mean_E.square().sum() for mean_E in means), torch.zeros(()))


class ModelHub:
    @staticmethod
    def build(model_config, features=None):
        model = TinyModel(json.loads((Path(model_config.model_name_or_path) / "config.json").read_text()))
        model.coefficient = getattr(getattr(features, "loss_cfg", None), "router_aux_loss_coef", 0.0)
        for module in model.modules():
            if hasattr(module, "skip_moe_pad_tokens"):
                module.skip_moe_pad_tokens = getattr(features, "skip_moe_pad_tokens", False)
        return model
