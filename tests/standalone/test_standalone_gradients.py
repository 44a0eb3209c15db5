"""The embedded trainer's gradients on several ranks are those of one process that sees the whole global batch.

The reference is transformers' own model with its own experts and its own auxiliary loss, without FSDP2, expert
parallelism or a dispatcher.
"""

import pytest
import torch

from launcher import run_ranks
from mindspeed_chunk.standalone.prepare import prepare
from standalone_ranks import gradients, read

EP = "parallel.expert_parallel_size"
DISPATCHER = "parallel.ep_plan.dispatcher"
AUX = "features.loss_cfg.router_aux_loss_coef"
BATCH = ["training.micro_batch_size=2", "data.dataset_param.basic_parameters.cutoff_len=48", f"{AUX}=0"]
# large enough for the balance part of the gradients to be seen
WITH_AUX = f"{AUX}=0.5"

RUNS = {
    2: {
        "alltoall": [f"{DISPATCHER}=alltoall", f"{EP}=2"],
        "chunkmoe": [f"{EP}=2"],
        "one expert-parallel rank": [f"{EP}=1"],
        "without recompute": [f"{EP}=2", "features.recompute=false"],
        "balance loss": [f"{EP}=2", WITH_AUX],
        "accumulation": [f"{EP}=2", WITH_AUX, "training.gradient_accumulation_steps=2"],
        "prefetch": [
            f"{EP}=2",
            "parallel.fsdp_plan.num_to_forward_prefetch=1",
            "parallel.fsdp_plan.num_to_backward_prefetch=2",
        ],
    },
    4: {
        "alltoall": [f"{DISPATCHER}=alltoall", f"{EP}=2", WITH_AUX],
        "chunkmoe": [f"{EP}=2", WITH_AUX],
        "four expert-parallel ranks": [f"{EP}=4"],
    },
}
# gradients that must be among the compared: of each kind of layer, router, shared and routed experts, embedding
LAYERS = "model.language_model.layers"
PARTS = {
    "model.language_model.embed_tokens.weight",
    f"{LAYERS}.0.linear_attn.in_proj_qkv.weight",
    f"{LAYERS}.3.self_attn.q_proj.weight",
    f"{LAYERS}.1.mlp.gate.weight",
    f"{LAYERS}.2.mlp.shared_expert.up_proj.weight",
    f"{LAYERS}.2.mlp.experts.gate_up_proj",
    "lm_head.weight",
}
# The gradients of linear attention's decay are small differences of large sums: fp32 leaves them fewer digits.
DECAY = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.in_proj_a.weight")


def reference(overrides, world_size):
    """(losses, gradients by name) of the mean over the micro batches that the ranks share."""
    config = read(*overrides, world_size=world_size)
    prepared = prepare(config)
    model = prepared.model
    with_aux = config.router_aux_loss_coef > 0
    model.config.text_config.router_aux_loss_coef = config.router_aux_loss_coef
    size = config.training.micro_batch_size
    count = world_size * config.training.gradient_accumulation_steps
    losses = {}
    for number in range(count):
        tokens = prepared.data.batch(number * size, size)
        output = model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=with_aux)
        (output.loss / count).backward()
        for name in ("loss", "aux_loss") if with_aux else ("loss",):
            losses[name] = losses.get(name, 0.0) + getattr(output, name).item() / count
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_equal_one_process(world_size):
    runs = {name: [*BATCH, *extra] for name, extra in RUNS[world_size].items()}
    results = run_ranks(gradients, world_size, runs)
    for name, overrides in runs.items():
        ep_size = int(next(o for o in overrides if o.startswith(EP)).partition("=")[2])
        losses, expected = reference(overrides, world_size)
        assert results[0][name]["losses"] == pytest.approx(losses, rel=1e-6), name
        assert set(results[0][name]["grads"]) == set(expected), name
        assert PARTS <= set(expected)
        for parameter, grad in expected.items():
            ranks = range(ep_size) if ".experts." in parameter else range(1)
            seen = torch.cat([results[rank][name]["grads"][parameter] for rank in ranks])
            assert seen.shape == grad.shape
            error = ((seen - grad).abs().max() / grad.abs().max()).item()
            assert error < (1e-4 if parameter.endswith(DECAY) else 1e-5), (name, parameter, error)
