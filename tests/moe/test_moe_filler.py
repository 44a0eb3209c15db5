"""What fills the ends of a layer call: it runs while the first rows travel and, differentiated, while the last do."""

import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from launcher import run_ranks
from layer import Case, Layer, distance
from mindspeed_chunk.config import KEEPS
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.filler import Filler
from mindspeed_chunk.moe.replay import replay_contexts
from mindspeed_chunk.observe import emit, observe

CASES = [
    *(Case(chunks=n, keep=keep, schedule=s) for n, keep, s in itertools.product((1, 3), KEEPS, ("rolling", "pair"))),
    Case(chunks=4, lookahead=2),
    Case(chunks=4, lookahead=0, keep="rows"),
    Case(chunks=3, padded=True),
    Case(chunks=3, routing="one_rank"),
    Case(chunks=3, tokens=(2, 9)),
    Case(chunks=3, frozen=("x", "weight")),
    Case(chunks=3, frozen=("fc1", "fc2")),
    Case(chunks=3, frozen=("weight", "fc1", "fc2")),
    Case(chunks=3, frozen=("x", "weight", "fc1", "fc2")),
]


class Noted(torch.autograd.Function):
    """The identity; tells when it ran, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        emit("filler", "forward")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        emit("filler", "backward")
        return grad


def results(layer, group, way, under_checkpoint):
    """The routed sum plus a dense layer of the same rows, and all gradients; `way` is where the dense layer runs."""
    dense = torch.randn(layer.case.hidden, layer.case.hidden, generator=torch.Generator().manual_seed(7)).double()
    local = {"fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, **local, "dense": dense})
    dispatcher = ChunkMoEDispatcher(layer.case.config())

    def block(x):
        filler = Filler(lambda: Noted.apply(torch.tanh(x @ leaves["dense"])))
        if way == "filler":
            with filler:
                routed = layer.call(dispatcher, {**leaves, "x": x}, group)
        else:
            routed = layer.call(dispatcher, {**leaves, "x": x}, group)
        return routed + filler.result()

    if under_checkpoint:
        out = checkpoint(block, leaves["x"], use_reentrant=False, context_fn=replay_contexts)
    else:
        out = block(leaves["x"])
    out.backward(layer.grad)
    return layer._results(out, leaves)


def compare(rank, world_size, cases):
    errors = []
    for case, under_checkpoint in itertools.product(cases, (False, True)):
        layer, group = Layer(case, rank, world_size), dist.group.WORLD
        got = results(layer, group, "filler", under_checkpoint)
        want = results(layer, group, "behind", under_checkpoint)
        assert torch.equal(got["out"], want["out"]), case
        errors.append(max(distance(got, want).values()))
    return errors


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_filler_changes_no_number(ranks):
    for errors in run_ranks(compare, ranks, CASES):
        assert len(errors) == 2 * len(CASES) and max(errors) <= 1e-14


def order_of_work(rank, world_size):
    told = {}
    for name, under_checkpoint in (("plain", False), ("checkpoint", True)):
        layer = Layer(Case(chunks=3), rank, world_size)
        with observe() as events:
            results(layer, dist.group.WORLD, "filler", under_checkpoint)
        told[name] = [e.name for e in events if e.kind in ("action", "filler")]
    return told


def test_it_stands_between_the_first_dispatch_and_what_waits_for_it_and_before_the_last_wait():
    forward = "P0 D0 forward P1 D1 E0 C0 P2 D2 E1 C1 U0 E2 C2 U1 U2".split()
    backward = "P0 D0 P1 D1 E0 C0 W0 P2 D2 E1 U0 C1 W1 E2 U1 C2 W2 backward U2".split()
    for told in run_ranks(order_of_work, 2):
        assert told["plain"] == forward + backward
        assert told["checkpoint"] == forward + forward + backward


def test_a_call_takes_only_the_filler_around_it_and_only_once():
    layer, ran = Layer(Case(chunks=2)), []
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    leaves = {"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH}
    filler = Filler(lambda: ran.append(1) or layer.x)
    layer.call(dispatcher, leaves)
    assert ran == []
    with filler:
        layer.call(dispatcher, leaves)
        layer.call(dispatcher, leaves)
    layer.call(dispatcher, leaves)
    assert filler.result() is layer.x and ran == [1]


def test_without_a_layer_call_the_result_is_computed_when_it_is_asked_for():
    filler = Filler(lambda: torch.ones(2))
    with filler:
        pass
    assert filler.result().tolist() == [1, 1]


def fail_once(rank, world_size):
    layer, group = Layer(Case(chunks=3), rank, world_size), dist.group.WORLD
    expected = layer.fast(group=group)
    dispatcher = ChunkMoEDispatcher(layer.case.config())

    def fail():
        raise RuntimeError("the shared expert failed")

    local = {"fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, **local})
    try:
        with Filler(fail):
            layer.call(dispatcher, leaves, group)
    except RuntimeError as error:
        told = str(error)
    assert distance(layer.fast(dispatcher, group), expected) == dict.fromkeys(expected, 0.0)
    return told


def test_after_a_failure_in_the_filler_the_next_call_runs():
    assert run_ranks(fail_once, 2) == ["the shared expert failed"] * 2


def test_a_backward_leaves_nothing_alive_where_nobody_comes_for_its_last_rows():
    layer = Layer(Case(chunks=3, frozen=("x", "weight")))
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    with Filler(lambda: layer.x):
        out = layer.call(ChunkMoEDispatcher(layer.case.config()), leaves)
    grad = layer.grad.clone()
    kept = weakref.ref(grad)
    out.backward(grad)
    del grad
    gc.collect()
    assert kept() is None and out.grad_fn.opened.walk is None


def test_a_failure_is_raised_again_where_the_result_is_asked_for():
    def fail():
        raise RuntimeError("the shared expert failed")

    filler = Filler(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the shared expert failed"):
            filler.result()


def experts_gradients_alone(rank, world_size):
    """Autograd then never comes to the node that waits for the last rows; the next call must not care."""
    layer, group = Layer(Case(chunks=3), rank, world_size), dist.group.WORLD
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    local = {"fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, **local})
    expected = layer.fast(dispatcher, group)
    out = layer.call(dispatcher, leaves, group)
    fc1, fc2 = torch.autograd.grad(out, (leaves["fc1"], leaves["fc2"]), layer.grad, retain_graph=True)
    assert torch.equal(fc1, expected["fc1"]) and torch.equal(fc2, expected["fc2"])
    out.backward(layer.grad)  # the same graph once more, all of it
    return max(distance(layer._results(out, leaves), expected).values())


def test_gradients_of_some_inputs_alone_and_a_graph_used_twice():
    assert run_ranks(experts_gradients_alone, 2) == [0.0, 0.0]
