"""A recompute runs with the forward's routes: nothing is gathered again, and a router that changed its mind is told."""

import functools
import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from launcher import run_ranks
from layer import Case, Layer, distance, recomputed
from mindspeed_chunk.config import KEEPS, ChunkMoEConfig
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.replay import _around, replay_contexts, replayed, reroute
from mindspeed_chunk.observe import observe


def test_reroute_keeps_the_experts_of_the_forward_and_the_places_of_the_recompute():
    kept = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2], [5, 5, 5], [3, 3, 1]])
    new = torch.tensor([[0, 1, 2], [2, 0, 1], [3, 2, 0], [5, 5, 5], [1, 3, 4]])
    routes, changed = reroute(new, kept)
    assert routes.tolist() == [[0, 1, 2], [2, 0, 1], [1, 2, 0], [5, 5, 5], [3, 3, 1]]
    assert changed.tolist() == [2]


def test_reroute_of_any_two_choices_sends_the_same_rows():
    choices = torch.tensor(list(itertools.permutations(range(5), 3)))
    new, kept = choices.repeat_interleave(len(choices), 0), choices.repeat(len(choices), 1)
    routes, changed = reroute(new, kept)
    assert torch.equal(routes.sort(1).values, kept.sort(1).values)
    shared = (new[:, :, None] == kept[:, None]).any(2)
    assert torch.equal(routes[shared], new[shared])
    assert changed.item() == (~shared).sum()


def changes(index, experts):
    """What a router may do on recompute: nothing, another order, two tokens that swap, another expert."""
    turned = index.roll(1, dims=1)
    swapped = index.clone()
    swapped[[0, 2]] = index[[2, 0]]
    other = index.clone()
    other[1, 0] = next(e for e in range(experts) if e not in index[1])
    return {"same": index, "turned": turned, "swapped": swapped, "other": other}


def changed_mind(rank, world_size, change, keep):
    """Results of a layer under a checkpoint, its distance to the same without, and what was seen on the way."""
    case = Case(chunks=3, tokens=(6, 5), keep=keep)
    layer = Layer(case, rank, world_size)
    dispatcher = ChunkMoEDispatcher(case.config())
    group = dist.group.WORLD
    dense = torch.rand(len(layer.x), case.experts, dtype=case.dtype, generator=torch.Generator().manual_seed(rank))
    names = {"x": layer.x, "weight": dense, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}

    def step(index_again):
        leaves, indices = layer.leaves(names), iter((layer.index, index_again))

        def block(x, weight):
            index = next(indices)
            return dispatcher(case.experts, weight.gather(1, index), index, x, leaves["fc1"], leaves["fc2"], group)

        if index_again is None:
            out = block(leaves["x"], leaves["weight"])
        else:
            out = recomputed(block, leaves["x"], leaves["weight"])
        out.backward(layer.grad)
        return layer._results(out, leaves)

    expected = step(None)
    index = changes(layer.index, case.experts)[change if rank == 0 else "same"]
    with observe() as events:
        got = step(index)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mindspeed_chunk").addHandler(handler)
    with observe() as later:
        step(None)
    logging.getLogger("mindspeed_chunk").removeHandler(handler)
    counts = {kind: sum(event.kind == kind for event in events) for kind in ("all_gather", "host_copy", "all_to_all")}
    told = [event.detail["by_rank"] for event in later if event.kind == "rerouted"]
    moved = distance(got, expected)
    unlike = (got["weight"] != expected["weight"]).sum().item()
    return moved, unlike, counts, told, lines


def changed_minds(rank, world_size, combinations):
    return [changed_mind(rank, world_size, *combination) for combination in combinations]


def test_a_router_that_changes_its_mind():
    # by how many choices; None: it depends on the tokens
    numbers = {"same": 0, "turned": 0, "swapped": None, "other": 1}
    combinations = list(itertools.product(numbers, KEEPS))
    by_rank = run_ranks(changed_minds, 2, combinations)
    for rank, results in enumerate(by_rank):
        for (change, _), (moved, unlike, counts, told, lines) in zip(combinations, results, strict=True):
            number = numbers[change]
            assert counts == {"all_gather": 1, "host_copy": 1, "all_to_all": 18}
            if number == 0:
                assert max(moved.values()) <= 1e-12, "the order in which a router lists its choices changes nothing"
                assert told == [] and lines == []
                continue
            # the rows go where they went in the forward; a changed choice's weight has its gradient where it stands now
            assert moved["out"] == 0 and (unlike > 0) == (rank == 0)
            (changed,) = told
            assert changed.keys() == {0} and (number is None or changed[0] == number)
            if rank == 0:
                (line,) = lines
                assert "the router chose other experts when its block was recomputed" in line


def against_the_reference(rank, world_size, combinations):
    return [errors_of(rank, world_size, *combination) for combination in combinations]


def errors_of(rank, world_size, change, keep, reentrant, dense_weights):
    """Of the gradients under a checkpoint whose router changes its mind, to those of the routes that must be taken."""
    case = Case(chunks=3, tokens=(6, 5), keep=keep, dense_weights=dense_weights)
    layer, group = Layer(case, rank, world_size), dist.group.WORLD if world_size > 1 else None
    dispatcher, first = ChunkMoEDispatcher(case.config()), layer.index
    dense = torch.rand(len(layer.x), case.experts, dtype=case.dtype, generator=torch.Generator().manual_seed(rank))
    again = changes(first, case.experts)[change]
    local = {"fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    leaves = layer.leaves({"x": layer.x, "weight": dense, **local})
    indices = iter((first, again))

    def block(x, weight):
        index = next(indices)
        weight = weight if dense_weights else weight.gather(1, index)
        return dispatcher(case.experts, weight, index, x, leaves["fc1"], leaves["fc2"], group)

    recomputed(block, leaves["x"], leaves["weight"], reentrant=reentrant).backward(layer.grad)
    got = {name: leaf.grad for name, leaf in leaves.items()}
    # the forward's experts, each with the weight at its place in the recompute, or with its own
    layer.index = first if dense_weights else reroute(again, first)[0]
    layer.weight = dense if dense_weights else dense.gather(1, again)
    want = layer.reference(group)
    del want["out"]
    if not dense_weights:
        want["weight"] = torch.zeros_like(dense).scatter_add(1, again, want["weight"])
    return distance(got, want)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_the_forwards_routes(ranks):
    """With both of torch's checkpoints, and router weights of both kinds."""
    combinations = list(itertools.product(("same", "turned", "swapped", "other"), KEEPS, (False, True), (False, True)))
    for errors in zip(combinations, *run_ranks(against_the_reference, ranks, combinations)):
        assert max(max(of_rank.values()) for of_rank in errors[1:]) <= 1e-11, errors


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_without_replay_is_refused(reentrant):
    layer = Layer(Case(chunks=2))
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    out = checkpoint(lambda x: layer.call(dispatcher, {**leaves, "x": x}), leaves["x"], use_reentrant=reentrant)
    with observe() as events, pytest.raises(RuntimeError, match="does not replay the routes of its forward"):
        out.backward(layer.grad)
    assert events == []


def test_a_parameter_that_an_activation_hides_is_refused_in_a_reentrant_checkpoint_too():
    """Its forward runs without gradients, and the recompute tries nothing."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    layer, dispatcher = Layer(Case(chunks=2)), ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=2))
    layer.activation = lambda fc1: fc1.chunk(2, -1)[0] * scale
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    with pytest.raises(ValueError, match="gradient would be lost"):
        recomputed(lambda x: layer.call(dispatcher, {**leaves, "x": x}), leaves["x"], reentrant=True)


def test_what_replayed_has_made_belongs_to_one_checkpoint_call():
    layer = Layer(Case(chunks=2))
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    block = replayed(lambda x: layer.call(dispatcher, {**leaves, "x": x}))
    checkpoint(block, leaves["x"], use_reentrant=True).backward(layer.grad)
    with pytest.raises(RuntimeError, match="belongs to one checkpoint call"):
        checkpoint(block, leaves["x"], use_reentrant=True)


def test_a_context_that_is_left_late_is_current_no_longer():
    """torch 2.7 leaves that of a failed forward when its frame is collected, perhaps inside of another one."""
    failed, other = (replay_contexts()[0] for _ in range(2))
    failed.__enter__()
    other.__enter__()
    failed.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert list(_around()) == []


def frozen_on_one(rank, world_size):
    """What a rank says of gradients that it alone needs, where only the recompute shows it."""
    layer = Layer(Case(chunks=2, frozen=("fc1", "fc2", "weight") if rank else ()), rank, world_size)
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    local = {"fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, **local})
    call = functools.partial(layer.call, dispatcher, group=dist.group.WORLD)
    out = recomputed(lambda x: call({**leaves, "x": x}), leaves["x"], reentrant=True)
    try:
        out.backward(layer.grad)
    except ValueError as error:
        return str(error)


def test_ranks_whose_needs_differ_in_a_reentrant_checkpoint_get_one_message():
    for message in run_ranks(frozen_on_one, 2):
        assert "needs a gradient of the router weights: True on rank 0, False on rank 1" in message


def nested(rank, world_size, reentrant):
    """A checkpoint inside a checkpoint: each level replays."""
    case = Case(chunks=2)
    layer = Layer(case, rank, world_size)
    dispatcher = ChunkMoEDispatcher(case.config())
    leaves = layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )

    def inner(x):
        return layer.call(dispatcher, {**leaves, "x": x}, dist.group.WORLD).sin()

    def outer(x):
        return recomputed(inner, inner(x), reentrant=reentrant)

    with observe() as events:
        out = recomputed(outer, leaves["x"], reentrant=reentrant)
        out.sum().backward()
    gathers = sum(event.kind == "all_gather" and event.name == "plan" for event in events)
    grads = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    inner(inner(leaves["x"])).sum().backward()
    return gathers, distance(grads, {name: leaf.grad for name, leaf in leaves.items()})


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_checkpoints(reentrant):
    for gathers, errors in run_ranks(nested, 2, reentrant):
        assert gathers == 2
        assert max(errors.values()) <= 1e-12


def test_a_second_backward_and_evaluation_in_between():
    """The tape belongs to one checkpointed call: neither a second backward nor other calls move it."""
    layer = Layer(Case(chunks=3))
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})

    def block(x):
        return layer.call(dispatcher, {**leaves, "x": x})

    first, second = (recomputed(block, leaves["x"]) for _ in range(2))
    with torch.no_grad():
        recomputed(block, leaves["x"] * 2)
    first.backward(layer.grad, retain_graph=True)
    once = leaves["x"].grad.clone()
    second.backward(layer.grad)
    first.backward(layer.grad)
    assert torch.allclose(leaves["x"].grad, 3 * once, rtol=1e-12, atol=0)


def test_another_number_of_calls_is_an_error():
    layer, calls = Layer(Case(chunks=2)), []
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})

    def block(x):
        calls.append(1)
        out = layer.call(dispatcher, {**leaves, "x": x})
        return out if len(calls) == 1 else layer.call(dispatcher, {**leaves, "x": out})

    with torch.utils.checkpoint.set_checkpoint_early_stop(False), pytest.raises(RuntimeError, match="more MoE layer"):
        recomputed(block, leaves["x"]).sum().backward()
