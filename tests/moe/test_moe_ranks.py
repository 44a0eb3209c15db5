"""The layer on 2 and 4 ranks against the reference over all ranks' tokens: routing, sizes, dtypes, schedules, modes."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from launcher import run_ranks
from layer import Case, Layer, check, distance
from layer_cases import OTHERS, ROUTINGS, SIZES
from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher


def cases() -> list[Case]:
    modes = itertools.product(SCHEDULES, KEEPS, ("LHF", "LFH"))
    dtypes = itertools.cycle((torch.float64, torch.float32, torch.bfloat16))
    found = []
    for schedule, keep, layout in modes:
        for change in (*ROUTINGS, *SIZES, *OTHERS):
            own = {"schedule": schedule, "keep": keep, "layout": layout, "chunks": 3, "dtype": next(dtypes)}
            found.append(Case(**{**own, **change}))
    return found


def check_all(rank, world_size, cases):
    return [max(check(case, rank, world_size, dist.group.WORLD).values()) for case in cases]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_matches_the_reference(ranks):
    run_ranks(check_all, ranks, cases())


def check_plain(rank, world_size, cases):
    for case in cases:
        check(case, rank, world_size, dist.group.WORLD, AllToAllDispatcher(weight_layout=case.layout))


def test_the_plain_dispatcher_matches_the_reference_too():
    """It is the baseline of losses and times, so it is checked as strictly."""
    changes = [change for change in (*ROUTINGS, *SIZES, *OTHERS) if "dtype" not in change]
    run_ranks(check_plain, 2, [Case(layout=layout, **c) for c in changes for layout in ("LHF", "LFH")])


def check_group(rank, world_size):
    """4 ranks, two groups of 2, each with its own experts and tokens; ranks of a group are not ranks of the world."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for case in (Case(chunks=3), Case(chunk_size=4, tokens=(13, 5), seed=1)):
        check(case, rank % 2, 2, groups[rank // 2])


def test_a_group_smaller_than_the_world():
    run_ranks(check_group, 4)


def check_evaluation(rank, world_size):
    """T changes from call to call, 4 tokens against none under no_grad, then training again."""
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=3))
    for tokens, grad in (((8, 8), True), ((4, 0), False), ((3, 5), True), ((0, 0), False), ((8, 1), True)):
        layer = Layer(Case(chunks=3, tokens=tokens), rank, world_size)
        with torch.set_grad_enabled(grad):
            got = layer.fast(dispatcher, dist.group.WORLD)
        with torch.enable_grad():
            want = layer.reference(dist.group.WORLD)
        if not grad:
            want = {"out": want["out"]}
            got = {"out": got["out"]}
        assert max(distance(got, want).values()) < 1e-12, (tokens, grad)


def test_tokens_change_from_call_to_call_and_in_evaluation():
    run_ranks(check_evaluation, 2)


class OverRanks(torch.autograd.Function):
    """A function of everybody's inputs, known to all ranks, computed by all together: what gradcheck can perturb.

    The backward sums over the ranks what each of them contributes to the gradient of an input.
    """

    @staticmethod
    def forward(ctx, local, *inputs):
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            out = local(*leaves)
        ctx.leaves, ctx.out = leaves, out
        gathered = [torch.empty_like(out) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, out.detach().contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, grad):
        own = grad.chunk(dist.get_world_size())[dist.get_rank()]
        grads = torch.autograd.grad(ctx.out, ctx.leaves, own, retain_graph=True, materialize_grads=True)
        grads = [tensor.contiguous() for tensor in grads]
        for tensor in grads:
            dist.all_reduce(tensor)
        return None, *grads


def gradcheck(rank, world_size, options):
    case = Case(tokens=(5,), hidden=4, intermediate=3, experts=4, top_k=2)
    layers = [Layer(case, r, world_size) for r in range(world_size)]
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(**options))

    def local(x_STH, weight_STK, fc1_EHF, fc2_EIH):
        own = layers[rank]
        return dispatcher(
            4, weight_STK[rank], own.index, x_STH[rank], own.local(fc1_EHF), own.local(fc2_EIH), dist.group.WORLD
        )

    inputs = [
        torch.stack([layer.x for layer in layers]),
        torch.stack([layer.weight for layer in layers]),
        layers[0].fc1_EHF,
        layers[0].fc2_EIH,
    ]
    return torch.autograd.gradcheck(partial(OverRanks.apply, local), [t.clone().requires_grad_() for t in inputs])


@pytest.mark.parametrize(
    "options", [{"moe_num_chunks": 3}, {"moe_chunk_size": 2, "chunk_moe_recompute": True}], ids=["chunks", "size"]
)
def test_gradcheck_over_ranks(options):
    assert run_ranks(gradcheck, 2, options) == [True, True]
