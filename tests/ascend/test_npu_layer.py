"""A whole layer on the NPU back end against the CPU back end: outputs and every gradient, on 1, 2 and 4 ranks."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ascend import rig
from launcher import run_ranks
from layer import TOLERANCE, Case, Layer, check, distance
from layer_cases import OTHERS, ROUTINGS, SIZES, WAIT_CASES
from mindspeed_chunk.config import KEEPS, ChunkMoEConfig
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.replay import replay_contexts
from mindspeed_chunk.ops.npu_ops import OPS
from wire import HeldWork

CHANGES = (*ROUTINGS, *SIZES, *OTHERS, {"routing": "balanced", "tokens": (16,), "activation": "module"})


def cases() -> list[Case]:
    """Every mode with every change, in one of the dtypes each."""
    modes = itertools.product(("rolling", "pair"), KEEPS, ("LHF", "LFH"))
    dtypes = itertools.cycle((torch.bfloat16, torch.float32, torch.bfloat16, torch.float64, torch.float32))
    found = []
    for (schedule, keep, layout), change in itertools.product(modes, CHANGES):
        own = {"schedule": schedule, "keep": keep, "layout": layout, "chunks": 3, "dtype": next(dtypes)}
        found.append(Case(**{**own, **change}))
    return found


def compare(rank, world_size, folder, cases):
    """Where the two differ by more than the dtype allows, and what was called."""
    npu, group, differing = rig.install(folder), dist.group.WORLD, []
    for case in cases:
        layer = Layer(case, rank, world_size)
        want = layer.fast(group=group)
        with rig.back_end(npu):
            got = layer.fast(group=group)
        errors = distance(got, want)
        same_kinds = all(got[name].dtype == want[name].dtype for name in want)
        if not same_kinds or max(errors.values()) > TOLERANCE[case.dtype]:
            differing.append((case, errors))
    return differing, rig.called


@pytest.mark.parametrize(
    "ranks, share",
    [
        (1, slice(0, None, 3)),
        (2, slice(1, None, 3)),
        pytest.param(4, slice(2, None, 6), marks=pytest.mark.slow),
    ],
)
def test_results_are_those_of_the_cpu_back_end(wheel_folder, ranks, share):
    everywhere = Case(routing="balanced", tokens=(16,), dtype=torch.bfloat16)  # rows from every rank for every expert
    for differing, called in run_ranks(compare, ranks, wheel_folder, [*cases()[share], everywhere]):
        assert not differing
        assert called == OPS.keys()


def move(rank, world_size, folder):
    """An expert that copies its input, weights of one: tokens come back, and so do gradients, through all exchanges."""
    npu, group, experts = rig.install(folder), dist.group.WORLD, 8
    case = Case(hidden=6, intermediate=6, top_k=1, experts=experts, tokens=(17, 11))
    for dtype, keep, chunks in itertools.product((torch.bfloat16, torch.float32), KEEPS, (1, 3)):
        layer = Layer(dataclasses.replace(case, dtype=dtype), rank, world_size)
        eye = torch.eye(6, dtype=dtype).repeat(experts // world_size, 1, 1)
        x = layer.x.clone().requires_grad_()
        dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=chunks, chunk_moe_keep=keep))
        with rig.back_end(npu):
            ones, fc1 = torch.ones(len(x), 1, dtype=dtype), torch.cat([torch.zeros_like(eye), eye], 2)
            out = dispatcher(experts, ones, layer.index, x, fc1, eye, group, activation=lambda fc1_RF: fc1_RF[:, 6:])
            out.backward(layer.grad)
        assert torch.equal(out, x) and torch.equal(x.grad, layer.grad), (dtype, keep, chunks)


def test_rows_that_only_move_are_bit_equal(wheel_folder):
    run_ranks(move, 2, wheel_folder)


BLOCKS = {"not read": lambda x, y: x + y, "read": lambda x, y: x * y}


def recompute(rank, world_size, folder):
    """A checkpointed block, whose output is left out where nothing reads it, against the CPU's without a checkpoint."""
    npu, group = rig.install(folder), dist.group.WORLD
    for keep, skip, after in itertools.product(KEEPS, (True, False), BLOCKS.values()):
        case = Case(tokens=(12, 7), dtype=torch.bfloat16, keep=keep)
        layer = Layer(case, rank, world_size)
        dispatcher = ChunkMoEDispatcher(
            ChunkMoEConfig(moe_num_chunks=4, chunk_moe_keep=keep, chunk_moe_skip_unread=skip)
        )
        leaves = layer.leaves(
            {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
        )

        def block(x, layer=layer, leaves=leaves, dispatcher=dispatcher, after=after):
            return after(x, layer.call(dispatcher, {**leaves, "x": x.sin()}, group))

        inputs = list(leaves.values())
        want = torch.autograd.grad(block(leaves["x"]), inputs, layer.grad)
        with rig.back_end(npu):
            plain = torch.autograd.grad(block(leaves["x"]), inputs, layer.grad)
            for _ in range(2):
                out = checkpoint(block, leaves["x"], use_reentrant=False, context_fn=replay_contexts)
                again = torch.autograd.grad(out, inputs, layer.grad)
                assert all(map(torch.equal, again, plain)), (keep, skip)
        errors = distance(dict(zip(leaves, plain, strict=True)), dict(zip(leaves, want, strict=True)))
        assert max(errors.values()) < TOLERANCE[torch.bfloat16], (keep, skip, errors)


def test_recompute_with_and_without_what_nobody_reads(wheel_folder):
    run_ranks(recompute, 2, wheel_folder)


def hold(rank, world_size, folder):
    """Rows arrive at the wait on their own work and no sooner; the send buffer stays, unchanged, until then."""
    npu = rig.install(folder)
    HeldWork.original, dist.all_to_all_single = dist.all_to_all_single, HeldWork
    with rig.back_end(npu):
        for case in WAIT_CASES:
            before = HeldWork.waits
            check(case, rank, world_size, dist.group.WORLD)
            assert HeldWork.waits - before == 4 * case.chunks + 2


def test_rows_are_read_after_their_wait_and_send_buffers_live_until_then(wheel_folder):
    run_ranks(hold, 2, wheel_folder)
