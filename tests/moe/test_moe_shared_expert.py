"""transformers' Qwen3.5 MoE block with its shared expert overlapped: the same numbers, or a refusal with the reason."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.moe.shared_expert import overlap_shared_expert


def model():
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(
        hidden_size=12, moe_intermediate_size=7, shared_expert_intermediate_size=9, num_experts=5, num_experts_per_tok=2
    )
    block = Qwen3_5MoeSparseMoeBlock(config).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return nn.ModuleDict({"mlp": block})


def results(block, x):
    x = x.clone().requires_grad_()
    out = block(x)
    out.sin().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in block.parameters())]


def test_the_overlapped_block_gives_the_same_numbers():
    plain, overlapped = model(), model()
    overlap_shared_expert(overlapped)
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    want, got = results(plain["mlp"], x), results(overlapped["mlp"], x)
    assert torch.equal(got[0], want[0])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_shared_expert_is_what_the_experts_are_called_with():
    """Whoever runs inside of the experts' call finds it there."""
    overlapped, seen = model(), []
    overlap_shared_expert(overlapped)
    shared = overlapped["mlp"].shared_expert
    shared.register_forward_hook(lambda *_: seen.append("shared"))
    overlapped["mlp"].experts.register_forward_pre_hook(lambda *_: seen.append("experts"))
    overlapped["mlp"](torch.randn(1, 2, 12, dtype=torch.float64))
    assert seen == ["experts", "shared"]


def refused(module):
    before = copy.copy(vars(module["mlp"])) if "mlp" in module else None
    with pytest.raises(ConfigError) as error:
        overlap_shared_expert(module)
    assert before is None or vars(module["mlp"]) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_block_of_another_kind_is_refused_by_name():
    class Scaled(Qwen3_5MoeSparseMoeBlock):
        def forward(self, hidden_states):
            return self.scale * super().forward(hidden_states)

    other = model()
    other["mlp"].__class__ = Scaled
    assert "mlp: its forward is not the known one: it differs in" in refused(other) and "scale" in refused(other)
    replaced = model()
    replaced["mlp"].forward = lambda x: x
    assert "mlp: its forward has been replaced" in refused(replaced)
    assert "no block of the model has experts, gate, shared_expert" in refused(nn.ModuleDict({"a": nn.Linear(2, 2)}))
