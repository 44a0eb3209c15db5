"""A recompute runs with the forward's routes: nothing is gathered again, and a router that changed its mind is told."""

import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from launcher import run_ranks
from layer import Case, Layer, distance
from mindspeed_chunk.config import KEEPS
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.replay import replay_contexts, reroute
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


def recomputed(rank, world_size, change, keep):
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
            out = checkpoint(block, leaves["x"], leaves["weight"], use_reentrant=False, context_fn=replay_contexts)
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


def recomputed_all(rank, world_size, combinations):
    return [recomputed(rank, world_size, *combination) for combination in combinations]


def test_a_router_that_changes_its_mind():
    # by how many choices; None: it depends on the tokens
    numbers = {"same": 0, "turned": 0, "swapped": None, "other": 1}
    combinations = list(itertools.product(numbers, KEEPS))
    by_rank = run_ranks(recomputed_all, 2, combinations)
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


def nested(rank, world_size):
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
        return checkpoint(inner, inner(x), use_reentrant=False, context_fn=replay_contexts)

    with observe() as events:
        out = checkpoint(outer, leaves["x"], use_reentrant=False, context_fn=replay_contexts)
        out.sum().backward()
    gathers = sum(event.kind == "all_gather" and event.name == "plan" for event in events)
    grads = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    inner(inner(leaves["x"])).sum().backward()
    return gathers, distance(grads, {name: leaf.grad for name, leaf in leaves.items()})


def test_checkpoints_in_checkpoints():
    for gathers, errors in run_ranks(nested, 2):
        assert gathers == 2
        assert max(errors.values()) <= 1e-12


def test_a_second_backward_and_evaluation_in_between():
    """The tape belongs to one checkpointed call: neither a second backward nor other calls move it."""
    layer = Layer(Case(chunks=3))
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})

    def block(x):
        return layer.call(dispatcher, {**leaves, "x": x})

    first, second = (checkpoint(block, leaves["x"], use_reentrant=False, context_fn=replay_contexts) for _ in range(2))
    with torch.no_grad():
        checkpoint(block, leaves["x"] * 2, use_reentrant=False, context_fn=replay_contexts)
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
        checkpoint(block, leaves["x"], use_reentrant=False, context_fn=replay_contexts).sum().backward()
