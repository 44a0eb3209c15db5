"""What the tests run on ranks: one launch surveys a whole flavour, since a launch is dear and a layer is cheap."""

import functools

import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh

import host_lookalike as host
from layer import distance
from mindspeed_chunk.observe import observe
from mindspeed_chunk.patches import install

E, H, WIDTH, K = (
    host.SIZES[name] for name in ("num_experts", "hidden_size", "moe_intermediate_size", "num_experts_per_tok")
)
TOKENS = (7, 5)  # a sequence on each rank
BATCH = 2
CHUNKED = {
    "one chunk": {},
    "N=2": {"moe_num_chunks": 2},
    "N=4, recompute": {"moe_num_chunks": 4, "chunk_moe_recompute": True},
    "size": {"moe_chunk_size": 3},
}


def start(flavour):
    """The flavour on the path, the plugin in place, the modules that matter imported."""
    host.put_on_path(flavour)
    install()
    from mindspeed_mm.fsdp.distributed import torch_parallelize
    from mindspeed_mm.fsdp.distributed.expert_parallel import ep_dispatcher

    return torch_parallelize, ep_dispatcher


@functools.cache
def ep_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))["ep"]


def plan(dispatcher, apply_modules=("experts",), **keys):
    from mindspeed_mm.fsdp.params.parallel_args import EPPlanConfig

    return EPPlanConfig(apply_modules=list(apply_modules), dispatcher=dispatcher, **keys)


def build(kind, ep_plan=None, skip_padding=False):
    """The block of a model, in fp64, its weights the same everywhere; sharded if there is a plan."""
    from mindspeed_mm.fsdp.distributed import torch_parallelize
    from mindspeed_mm.fsdp.models.modelhub import block_class

    torch.manual_seed(0)
    block = block_class(kind)(E, H, WIDTH, K).double()
    block.experts.skip_moe_pad_tokens = skip_padding
    if ep_plan is not None:
        torch_parallelize.expert_parallelize_modules(block, ep_mesh(), ep_plan)
    return block


def run(block, recompute=False):
    """Output and gradients of one call on this rank's tokens, the experts' share of this rank only."""
    from mindspeed_mm.fsdp.features.memory.recompute import recompute_wrapper

    length = TOKENS[dist.get_rank()]
    draw = torch.Generator().manual_seed(5 + dist.get_rank())
    x, grad = (torch.randn(BATCH, length, H, generator=draw, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(BATCH, length, generator=draw) > 0.3).to(torch.int64)
    block.zero_grad()
    x.requires_grad_()
    out = recompute_wrapper(block, use_reentrant=False)(x, mask) if recompute else block(x, mask)
    out.backward(grad)
    experts = [getattr(block.experts, name).grad for name in ("gate_up_proj", "down_proj")]
    fc1, fc2 = (grad.to_local() if hasattr(grad, "to_local") else grad for grad in experts)
    return {"out": out.detach(), "x": x.grad, "gate": block.gate.weight.grad.clone(), "fc1": fc1, "fc2": fc2}


def without_dispatcher(kind):
    """What the model itself computes with all experts on every rank: for one whose alltoall is broken."""
    results = run(build(kind))
    for name in ("fc1", "fc2"):
        dist.all_reduce(results[name])
        results[name] = results[name].chunk(dist.get_world_size())[dist.get_rank()]
    return results


def attempt(function, *args, **kwargs):
    """The result, or the error as text."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def direct_arguments(**extra):
    """Arguments of a call of the dispatcher itself, and the leaves whose gradients count."""
    rank, local = dist.get_rank(), E // dist.get_world_size()
    draw, shared = torch.Generator().manual_seed(50 + rank), torch.Generator().manual_seed(9)
    tokens = BATCH * TOKENS[rank]
    fc1 = torch.randn(E, H, 2 * WIDTH, generator=shared, dtype=torch.float64)[rank * local : (rank + 1) * local]
    fc2 = torch.randn(E, WIDTH, H, generator=shared, dtype=torch.float64)[rank * local : (rank + 1) * local]
    weight = torch.rand(tokens, K, generator=draw, dtype=torch.float64)
    index = torch.rand(tokens, E, generator=draw).topk(K).indices
    x = torch.randn(tokens, H, generator=draw, dtype=torch.float64)
    leaves = {
        name: tensor.clone().requires_grad_()
        for name, tensor in {"weight": weight, "x": x, "fc1": fc1, "fc2": fc2}.items()
    }
    if extra.get("skip_moe_pad_tokens"):
        extra["seq_mask"] = (torch.rand(tokens, generator=draw) > 0.3).to(torch.int64)
    names = {"fc1_weight": leaves["fc1"], "fc2_weight": leaves["fc2"], "ep_group": ep_mesh().get_group(), **extra}
    return (E, leaves["weight"], index, leaves["x"]), names, leaves


def direct(function, **extra):
    """Output and gradients of `function`, called as a model calls its dispatcher."""
    args, names, leaves = direct_arguments(**extra)
    out = function(*args, **names)
    out.backward(torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


DIRECT = {
    "26.0": {"plain": {}},
    "26.1": {"plain": {}, "limit": {"swiglu_limit": 0.5}},
    "master": {"plain": {}, "limit": {"swiglu_limit": 0.5}, "padding": {"skip_moe_pad_tokens": True}},
    "newest": {
        "plain": {},
        "limit": {"swiglu_limit": 0.5},
        "padding": {"skip_moe_pad_tokens": True},
        "alpha": {"swiglu_alpha": 1.7, "swiglu_limit": 0.5},
    },
}


def survey(rank, world_size, flavour):
    """Everything about one flavour that one process may see: first the host alone, then Chunk MoE."""
    torch_parallelize, ep_dispatcher = start(flavour)
    from mindspeed_mm import lookalike

    told = {"balanced": getattr(ep_dispatcher, "FORCE_EP_BALANCE", None)}
    original, plain = ep_dispatcher.ep_forward, host.PLAIN[flavour]
    # forced balance is the dispatcher's, and the model whose alltoall is broken has no other reference
    kinds = [kind for kind in host.KINDS[flavour] if kind != "wan2_2" or not told["balanced"]]
    padding = flavour in host.PADDING

    told["upstream"] = {kind: attempt(lambda kind=kind: run(build(kind, plan(plain)))) for kind in kinds}
    expected = told["upstream"] | {kind: without_dispatcher(kind) for kind in kinds if kind == "wan2_2"}
    if padding:
        expected["padded"] = run(build("qwen3_5_moe", plan(plain), skip_padding=True))
    expected_direct = {name: direct(original, **extra) for name, extra in DIRECT[flavour].items()}
    told["output"] = expected["qwen3_5_moe"]["out"].flatten().tolist()
    told["untouched"] = ep_dispatcher.ep_forward is original and original.__module__ == ep_dispatcher.__name__
    told["ran"], told["stack"] = sorted(set(lookalike.ran)), _ours(lookalike.stack_modules)
    told["others"] = {}
    for name in ("mc2", "allgather") if flavour != "26.0" else ():
        lookalike.ran.clear()
        with observe() as events:
            results = run(build("qwen3_5_moe", plan(name)))
        told["others"][name] = (lookalike.ran[:], len(events), max(distance(results, expected["generic"]).values()))
    told["untouched"] = told["untouched"] and ep_dispatcher.ep_forward is original
    if flavour != "26.0":
        from mindspeed_mm.fsdp.models.mimov2_5.modeling_mimo_v2 import PatchMiMoV2NaiveMoe

        PatchMiMoV2NaiveMoe._ep_dispatcher_dict = None  # filled by the host's run above; a real run has one dispatcher

    lookalike.ran.clear()
    told["errors"], told["actions"] = {}, {}
    for name, keys in CHUNKED.items():
        for kind in kinds:
            with observe() as events:
                results = run(build(kind, plan("chunkmoe", **keys)))
            told["errors"][kind, name] = distance(results, expected[kind])
            told["actions"][kind, name] = sum(event.kind == "action" for event in events)
    told["errors"]["qwen3_5_moe", "checkpoint"] = distance(
        run(build("qwen3_5_moe", plan("chunkmoe", moe_num_chunks=2)), recompute=True), expected["qwen3_5_moe"]
    )
    twice = {"apply_modules": ("experts", "exp*")}
    told["two names"] = [attempt(build, "generic", plan(name, **twice)) for name in (plain, "chunkmoe")]
    if padding:
        padded = run(build("qwen3_5_moe", plan("chunkmoe", moe_num_chunks=3), skip_padding=True))
        told["errors"]["qwen3_5_moe", "padding"] = distance(padded, expected["padded"])
    for name, extra in DIRECT[flavour].items():
        told["errors"]["direct", name] = distance(direct(ep_dispatcher.ep_forward, **extra), expected_direct[name])
    told["host ran"] = sorted(set(lookalike.ran))
    told["module"] = _published(flavour, expected_direct)
    return told


def _ours(modules):
    return sorted(name for name in modules if name.startswith("mindspeed_chunk"))


def _published(flavour, expected):
    """The module `ep_chunkmoe`, whoever it belongs to: its functions against counting by hand and the alltoall."""
    import importlib

    module = importlib.import_module(f"{host.PACKAGE}.ep_chunkmoe")
    told = {"file": getattr(module, "__file__", None)}
    if flavour in host.OWN_CHUNKMOE:
        return told
    results = direct(module.ep_chunkmoe_forward, ep_plan=plan("chunkmoe", moe_num_chunks=3))
    told["errors"] = distance(results, expected["plain"])
    told["without a plan"] = attempt(direct, module.ep_chunkmoe_forward)

    def ids(rank):
        return torch.rand(11, E, generator=torch.Generator().manual_seed(rank)).topk(K).indices

    world_size, rank = dist.get_world_size(), dist.get_rank()
    local = E // world_size
    chunks = [[piece.flatten().tolist() for piece in ids(peer).split(4)] for peer in range(world_size)]
    got = module.batched_pre_dispatch_metadata(list(ids(rank).split(4)), E, ep_mesh().get_group())
    for chunk, (sent, received, counts_RL, sums_L) in enumerate(zip(*got, strict=True)):
        mine = chunks[rank][chunk]
        by_hand_RL = [[chunks[peer][chunk].count(rank * local + e) for e in range(local)] for peer in range(world_size)]
        assert sent == [sum(e // local == peer for e in mine) for peer in range(world_size)]
        assert received == [sum(row) for row in by_hand_RL]
        assert counts_RL.tolist() == by_hand_RL and sums_L.tolist() == [sum(column) for column in zip(*by_hand_RL)]
    told["chunks"] = len(got[0])
    told["uneven"] = attempt(module.batched_pre_dispatch_metadata, [ids(rank)], E + 1, ep_mesh().get_group())
    return told
