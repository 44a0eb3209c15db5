"""What the tests of the planner measure on ranks: the embedded trainer's state, collectives, one MoE layer."""

import dataclasses
import json
import math
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_chunk import planner
from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig
from mindspeed_chunk.observe import observe
from mindspeed_chunk.planner import ChunkRows
from mindspeed_chunk.standalone.model import use_dispatcher
from mindspeed_chunk.standalone.parallel import build_meshes
from mindspeed_chunk.tools.measure import Collectives, LiveBytes
from standalone_ranks import EXAMPLE, trainer

CHUNKS = (1, 2, 4, 8)
BOUND, NEAR = 0.05, 0.01
A_FEW_COUNTS = 2048  # bytes: of rows and experts, which a plan may keep as a tensor beside what grows with the tokens
PASSES = 100  # at most; gloo's threads let go of what they carried a moment after the wait, so the least one counts
SETTLE_S = 0.01
MIDDLE = {"hidden_size": 384, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 192}


def write_middle_model(folder):
    """A config folder of a model between the tiny one and a real one. Returns its path."""
    content = json.loads((EXAMPLE / "tiny" / "config.json").read_text())
    content["text_config"] |= MIDDLE
    content["vision_config"]["out_hidden_size"] = MIDDLE["hidden_size"]
    (Path(folder) / "config.json").write_text(json.dumps(content))
    return str(folder)


def state(rank, world_size, overrides):
    """Bytes of parameters, gradients and optimizer state after one step: (parameters, gradients, optimizer)."""
    this = trainer(*overrides)
    this.backward(0)
    local = [p.to_local() for p in this.model.parameters()]
    grads = [p.grad.to_local() for p in this.parameters]
    this.optimizer.step()
    kept = [value for state in this.optimizer.state.values() for value in state.values()]
    kept = [value.to_local() if hasattr(value, "to_local") else value for value in kept]
    return [sum(t.numel() * t.element_size() for t in tensors) for tensors in (local, grads, kept)]


def traffic(rank, world_size, runs):
    """FSDP2's collectives and the all-to-alls of one step: {name: (calls, bytes, all-to-alls)}."""
    found = {}
    for name, overrides in runs.items():
        this = trainer(*overrides)
        this.step(0)
        with Collectives() as collectives, observe() as events:
            this.step(1)
        sent = [event.detail for event in events if event.kind == "all_to_all"]
        found[name] = (dict(collectives.calls), dict(collectives.nbytes), sent)
    return found


def expert_memory(rank, world_size, overrides, shape):
    """Of the first MoE layer: {(keep, schedule, N): ((kept, peak forward, peak backward), the ledger's prediction)}."""
    this = trainer(*overrides)
    experts = next(m for name, m in this.model.named_modules() if name.endswith("layers.0.mlp.experts"))
    experts.unshard()
    text = this.model.config.text_config
    generator = torch.Generator().manual_seed(rank)
    dtype = getattr(torch, this.config.fsdp.param_dtype)
    x_TH, grad_TH = (torch.randn(shape.tokens, text.hidden_size, generator=generator).to(dtype) for _ in range(2))
    weight_TK = torch.rand(shape.tokens, text.num_experts_per_tok, generator=generator).to(dtype)
    chance_TE = torch.ones(shape.tokens, text.num_experts)
    index_TK = torch.multinomial(chance_TE, text.num_experts_per_tok, generator=generator)
    indices = [torch.empty_like(index_TK) for _ in range(world_size)]
    dist.all_gather(indices, index_TK)
    group, found = build_meshes(world_size).ep_group, {}
    for keep in KEEPS:
        for schedule in SCHEDULES:
            for n in CHUNKS:
                chunk_moe = ChunkMoEConfig(
                    moe_num_chunks=n,
                    chunk_moe_keep=keep,
                    chunk_moe_schedule=schedule,
                    chunk_moe_dispatch=shape.dispatch,
                )
                use_dispatcher([experts], dataclasses.replace(this.config, chunk_moe=chunk_moe), group)
                rows = rows_of(indices, n, rank, text.num_experts, shape.dispatch)
                predicted = planner.expert_memory(shape, num_chunks=n, schedule=schedule, keep=keep, rows=rows)
                call = (experts, x_TH, index_TK, weight_TK, grad_TH)
                layer_memory(*call)  # the agreements
                found[keep, schedule, n] = least(predicted, call), predicted
    return found


def errors(measured, predicted):
    """Of what is kept, and of the peaks without the weights' gradients: how far off the ledger's bytes are."""
    kept, forward, backward = measured
    few = abs(predicted.kept - kept) <= A_FEW_COUNTS
    return (
        0.0 if few else predicted.kept / kept - 1,
        predicted.forward_peak / forward - 1,
        predicted.backward_peak / (backward - predicted.weight_grads) - 1,
    )


def least(predicted, call):
    """The least of as many passes as it takes to come near what was predicted, on every rank."""
    measured = [math.inf] * 3
    for _ in range(PASSES):
        measured = [min(pair) for pair in zip(measured, layer_memory(*call))]
        off = torch.tensor(max(map(abs, errors(measured, predicted))))
        dist.all_reduce(off, dist.ReduceOp.MAX)
        if off < NEAR:
            break
    return measured


def layer_memory(experts, x_TH, index_TK, weight_TK, grad_TH):
    x_TH, weight_TK = x_TH.requires_grad_(), weight_TK.requires_grad_()
    weights = list(experts.parameters())
    dist.barrier()
    with LiveBytes() as live:
        out_TH = experts.forward(x_TH, index_TK, weight_TK)
        time.sleep(SETTLE_S)
        kept, forward, live.peak = live.now - out_TH.nbytes, live.peak, live.now
        torch.autograd.grad(out_TH, (x_TH, weight_TK, *weights), grad_TH)
        return kept, forward, live.peak


def rows_of(indices, num_chunks, rank, num_experts, dispatch="per_expert"):
    """ChunkRows of this rank from every rank's [T, K] expert ids."""
    local = num_experts // len(indices)
    rows = []
    for parts in zip(*(index.split(-(-len(index) // num_chunks)) for index in indices)):
        here = Counter(n for part in parts for n in part.flatten().tolist() if n // local == rank)
        sent, received = parts[rank].numel(), here.total()
        if dispatch == "per_rank":
            ranks_of = [[{n // local for n in token} for token in part.tolist()] for part in parts]
            sent = sum(map(len, ranks_of[rank]))
            received = sum(rank in ranks for tokens in ranks_of for ranks in tokens)
        rows.append(ChunkRows(len(parts[rank]), sent, received, max(here.values()), here.total()))
    return rows
