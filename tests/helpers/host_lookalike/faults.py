"""Runs on ranks that go wrong, and the path that has a group of its own."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from host_lookalike.ranks import WIDTH, E, H, K, attempt, build, direct_arguments, ep_mesh, plan, run, start
from layer import distance
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig
from mindspeed_chunk.mbs.block import ChunkMBS
from mindspeed_chunk.observe import observe
from mindspeed_chunk.patches import remove


class Stumbling(torch.nn.Module):
    """An activation that raises once, at a call whose number is given."""

    def __init__(self, inner, at):
        super().__init__()
        self.inner, self.left = inner, at

    def forward(self, fc1_RF):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError(f"the activation of rank {dist.get_rank()} gives up")
        return self.inner(fc1_RF)


def stumble(block, at):
    block.experts.act_fn = Stumbling(block.experts.act_fn, at)
    return block


def different_settings(rank, world_size):
    """N differs between the ranks."""
    start("master")
    return attempt(run, build("qwen3_5_moe", plan("chunkmoe", moe_num_chunks=2 + rank)))


def all_raise(rank, world_size):
    """Every rank raises in its second chunk, forward, then backward; the step after that is right."""
    start("master")
    expected = run(build("kimi_k3", plan("alltoall")))
    # the first call is the probe with one row of zeros, forward and backward call it once a chunk each
    told = []
    for at in (3, 6):
        block = stumble(build("kimi_k3", plan("chunkmoe", moe_num_chunks=4)), at)
        told.append(attempt(run, block))
        told.append(max(distance(run(block), expected).values()))
    return told


def one_raises(rank, world_size):
    """Rank 1 raises in its second chunk, the other waits for it."""
    start("master")
    block = build("kimi_k3", plan("chunkmoe", moe_num_chunks=4))
    run(stumble(block, 3) if rank == 1 else block)


def other_routing_on_recompute(rank, world_size, flavour, reentrant, replay):
    """The host's recompute of a block; rank 0 routes a token to the other rank, then swaps two, and that is undone.

    replay: the newest host's op replay acts on the router in the same recompute.
    """
    start(flavour)
    from mindspeed_mm import lookalike
    from mindspeed_mm.fsdp.features.memory.recompute import recompute_wrapper

    told = []
    for change in ("none", "another rank", "swapped"):
        block, calls, contexts = build("qwen3_5_moe", plan("chunkmoe", moe_num_chunks=2)), [], ()
        if replay:
            contexts = (op_replay_contexts(block, "gate"),)
        lookalike.ran.clear()

        def layer(x, change=change, calls=calls, block=block):
            index = (torch.arange(x.shape[0])[:, None] + torch.arange(3)) % E
            calls.append(1)
            if len(calls) == 2 and rank == 0:
                if change == "another rank":
                    index[2] = (index[2] + E // world_size) % E
                if change == "swapped":
                    index[[0, 5]] = index[[5, 0]]
            weight = block.gate(x).softmax(-1).gather(1, index)
            return block.experts(x, index, weight)

        x = torch.randn(9, H, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(rank))
        with observe() as events:
            recompute_wrapper(layer, reentrant, *contexts)(x).sum().backward()
            gathers = sum(event.kind == "all_gather" and event.name == "plan" for event in events)
            layer(x.detach()).sum().backward()
        rerouted = [event.detail["by_rank"] for event in events if event.kind == "rerouted"]
        gradients = [each.grad.norm().item() for each in (block.experts.down_proj, block.gate.weight)]
        told.append((sum(gradients), gathers, rerouted, len(calls), lookalike.ran.count("replayed")))
    return told


def op_replay_contexts(block, *names):
    from mindspeed_mm.fsdp.features.memory.op_replay import build_op_replay_context_fn
    from mindspeed_mm.fsdp.features.memory.swap_manager import SwapManager
    from mindspeed_mm.fsdp.params.feature_args import OpReplayScopeConfig

    return build_op_replay_context_fn(
        block, [OpReplayScopeConfig(apply_modules=list(names))], False, SwapManager(None).get_cache("op_replay")
    )


def kimi_layers(rank, world_size):
    """Three decoder layers in micro-chunks, recomputed, their experts in chunks; against the batch and the alltoall."""
    torch_parallelize, _ = start("newest")
    from mindspeed_mm.fsdp.features.memory.recompute import recompute_wrapper
    from mindspeed_mm.fsdp.models.kimi_k3.modeling_kimi_linear import KimiDecoderLayer

    def results(dispatcher, chunk_mbs=None):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(KimiDecoderLayer(E, H, WIDTH, K, number) for number in range(3)).double()
        experts = plan(dispatcher, ["{*}.block_sparse_moe.experts"])
        torch_parallelize.expert_parallelize_modules(layers, ep_mesh(), experts)
        chunk = ChunkMBS(ChunkMBSConfig(chunk_mbs=chunk_mbs or 1), batch_sizes=(5,), group=dist.group.WORLD)
        for number, layer in enumerate(layers if chunk_mbs else ()):
            own = layer.forward
            layer.forward = chunk.wrap(f"layers.{number}", recompute_wrapper(own, False), own)
        draw = torch.Generator().manual_seed(rank)
        x = torch.randn(5, 7, H, generator=draw, dtype=torch.float64).requires_grad_()
        hidden, mask, residual = x * 1, torch.rand(5, 7, generator=draw) > 0.2, x.new_zeros(35, 0, H)
        for layer in layers:
            hidden, residual = layer(hidden, attention_mask=mask, block_residual=residual)
        (hidden.square().sum() + residual.sin().sum()).backward()
        gradients = {name: each.grad for name, each in layers.named_parameters()}
        gradients = {name: g.to_local() if hasattr(g, "to_local") else g for name, g in gradients.items()}
        return {"out": hidden.detach(), "left": residual.detach(), "x": x.grad} | gradients

    expected = results("alltoall")
    told = {}
    for dispatcher in ("alltoall", "chunkmoe"):
        with observe() as events:
            told[dispatcher] = max(distance(results(dispatcher, chunk_mbs=2), expected).values())
        told[f"micro-chunks, {dispatcher}"] = sum(event.kind == "micro_chunk" for event in events)
    return told


def mcore(rank, world_size):
    """The path that binds the function at import, has its own key and its own group."""
    _, ep_dispatcher = start("master")
    from megatron.core import mpu
    from mindspeed_mm.mcore.models.qwen3_5 import modules

    from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
    from mindspeed_chunk.patches import ep_dispatcher as patch
    from mindspeed_chunk.patches import remove

    group, original = mpu.get_expert_model_parallel_group(), ep_dispatcher.ep_forward

    def layer(kind="alltoall"):
        config = SimpleNamespace(moe_token_dispatcher_type=kind, num_moe_experts=E, hidden_size=H)
        args, names, leaves = direct_arguments()
        out = modules.MM_MoELayer(config).forward(
            args[3], args[1], args[2], leaves["fc1"].flatten(1), leaves["fc2"].flatten(1)
        )
        out.sum().backward()
        return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

    told = {"refused": attempt(layer, "chunkmoe"), "bound": modules.ep_forward is original}
    expected = layer()
    run(build("qwen3_5_moe", plan("chunkmoe", moe_num_chunks=2)))  # another group asks for it
    with observe() as events:
        told["own group"] = max(distance(layer(), expected).values()), len(events)
    patch.activate(group, ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=2)))
    with observe() as events:
        told["asked"] = max(distance(layer(), expected).values()), len(events) > 0
    remove()
    told["restored"] = modules.ep_forward is original and ep_dispatcher.ep_forward is original
    return told


def native(rank, world_size):
    """The newest version with its own chunkmoe: chosen by the environment, and what it makes of padding."""
    _, ep_dispatcher = start("newest")
    from mindspeed_mm import lookalike

    expected = run(build("qwen3_5_moe", plan("alltoall"), skip_padding=True))
    told, original = {}, ep_dispatcher.ep_forward
    for kind in ("generic", "qwen3_5_moe"):
        lookalike.ran.clear()
        with observe() as events:
            results = run(build(kind, plan("chunkmoe", moe_num_chunks=2), skip_padding=True))
        told[kind] = lookalike.ran[:], len(events), max(distance(results, expected).values())
    for kind in ("glm5_next", "kimi_k3"):
        told[kind] = attempt(lambda kind=kind: run(build(kind, plan("chunkmoe", moe_num_chunks=2))))
    told["untouched"] = ep_dispatcher.ep_forward is original
    return told


def master_faults(rank, world_size):
    """Three of the above in one launch, each with the patches set anew: a group keeps the dispatcher it was given."""
    told = {}
    for name, function in {"settings": different_settings, "raises": all_raise, "mcore": mcore}.items():
        told[name] = function(rank, world_size)
        remove()
    return told
