"""What ranks do when one of them is wrong: one message on all of them, and no hang."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from launcher import HANG_S, run_ranks
from layer import Case, Layer, check, distance
from wire import Counted, prepared


def disagree(rank, world_size, cases):
    """Each case: what rank 0 and rank 1 are called with. The message, on this rank."""
    messages = []
    for pair in cases:
        layer = Layer(pair[rank], rank, world_size)
        try:
            layer.fast(group=dist.group.WORLD)
            messages.append(None)
        except ValueError as error:
            messages.append(str(error))
    check(Case(chunks=3), rank, world_size, dist.group.WORLD)  # the next call does not meet stale state
    return messages


def test_ranks_that_differ_get_one_message_on_all_of_them():
    base = Case(chunks=2, experts=8, top_k=3)
    changes = {
        "moe_num_chunks: 2 on rank 0, 3 on rank 1": {"chunks": 3},
        "moe_chunk_size: 0 on rank 0, 4 on rank 1": {"chunks": 0, "chunk_size": 4},
        "chunk_moe_schedule: rolling on rank 0, pair on rank 1": {"schedule": "pair"},
        "chunk_moe_keep: activations on rank 0, input on rank 1": {"keep": "input"},
        "num_experts: 8 on rank 0, 4 on rank 1": {"experts": 4},
        "experts per token: 3 on rank 0, 2 on rank 1": {"top_k": 2},
        "hidden size: 10 on rank 0, 6 on rank 1": {"hidden": 6},
        "dtype of the rows: torch.float64 on rank 0, torch.float32 on rank 1": {"dtype": torch.float32},
        "dtype of the router weights: torch.float64 on rank 0, torch.float32": {"router_dtype": torch.float32},
        "needs a gradient of the rows: True on rank 0, False on rank 1": {"frozen": ("x",)},
        "needs a gradient of the router weights: True on rank 0, False on rank 1": {"frozen": ("weight",)},
        "needs a backward: True on rank 0, False on rank 1": {"frozen": ("x", "weight", "fc1", "fc2")},
        "must be divisible by the size of the expert-parallel group, 2": {"experts": 7},
    }
    cases = [(base, dataclasses.replace(base, **change)) for change in changes.values()]
    first, second = run_ranks(disagree, 2, cases)
    assert first == second
    for wanted, message in zip(changes, first, strict=True):
        assert message is not None and wanted in message and "\n" not in message, (wanted, message)


def raising(fc1_RF):
    raise RuntimeError("no")


def disagree_later(rank, world_size):
    """The same, but with a dispatcher whose ranks have agreed before."""
    layer, leaves, dispatcher = prepared(Case(chunks=2), rank, world_size)
    good = {
        "num_experts": 8,
        "routing_weights": leaves["weight"],
        "selected_experts": layer.index,
        "hidden_states": leaves["x"],
        "fc1_weight": leaves["fc1"],
        "fc2_weight": leaves["fc2"],
        "ep_group": dist.group.WORLD,
    }
    changes = [
        {"hidden_states": leaves["x"].detach(), "routing_weights": leaves["weight"].detach()},
        {"routing_weights": leaves["weight"].float()},
        {"selected_experts": layer.index[:-1]},
        {"fc1_weight": leaves["fc1"].transpose(1, 2)},
        {"selected_experts": layer.index.masked_fill(layer.index == 3, 8)},
        {"skip_moe_pad_tokens": True},
        {
            "routing_weights": torch.rand(len(layer.x), 8, dtype=torch.float64).requires_grad_(),
            "selected_experts": layer.index + 6,
        },
        {"activation": raising},
    ]
    messages = []
    for change in changes:
        with pytest.raises(ValueError) as caught:
            dispatcher(**(good | change if rank == 1 else good))
        messages.append(str(caught.value))
        dispatcher(**good).backward(layer.grad)
    return messages


def test_a_rank_that_goes_wrong_later_is_told_to_all_of_them_too():
    first, second = run_ranks(disagree_later, 2)
    assert first == second
    wanted = [
        "needs a gradient of the rows: True on rank 0, False on rank 1",
        "dtype of the router weights: torch.float64 on rank 0, torch.float32 on rank 1",
        "rank 1: selected_experts: shape",
        "rank 1: fc1_weight, fc2_weight: shapes",
        "on rank 1 of the ids are outside [0, 8)",
        "rank 1: seq_mask: None",
        "on rank 1 of the ids are outside [0, 8)",
        "rank 1: activation: it failed on one row of zeros: RuntimeError: no",
    ]
    for message, part in zip(first, wanted, strict=True):
        assert part in message, (part, message)


def uneven_experts(rank, world_size):
    with Counted() as counter, pytest.raises(ValueError, match="num_experts: 7: must be divisible"):
        Layer(Case(experts=7), rank, world_size).fast(group=dist.group.WORLD)
    return counter.take()


def test_experts_that_do_not_divide_are_an_error_on_every_rank():
    """Told in the agreement; no row is exchanged but those that check the wire."""
    assert run_ranks(uneven_experts, 2) == [{"all_to_all": 2, "gather": 1, "other": 0}] * 2


def broken_wire(rank, world_size, broken):
    original = dist.all_to_all_single

    def zeros(output, *args, **kwargs):
        work = original(output, *args, **kwargs)
        if rank in broken:
            work.wait()
            output.zero_()
        return work

    dist.all_to_all_single = zeros
    with pytest.raises(ValueError) as caught:
        Layer(Case(chunks=2), rank, world_size).fast(group=dist.group.WORLD)
    return str(caught.value)


def test_an_all_to_all_that_returns_zeros_is_found_at_the_first_call():
    for broken in ((0, 1), (1,)):
        messages = run_ranks(broken_wire, 2, broken)
        assert len(set(messages)) == 1 and "all_to_all_single moved the wrong rows" in messages[0]
        assert f"rank {broken[0]}:" in messages[0]


def raise_in_a_chunk(rank, world_size, who):
    """`who` raise in the activation of their second chunk."""
    calls = []

    def activation(fc1_RF):
        calls.append(len(fc1_RF))
        if rank in who and len(calls) == 3:  # the first is the check of the activation
            raise RuntimeError(f"rank {rank} has had enough")
        return fc1_RF.chunk(2, dim=-1)[0]

    layer, leaves, dispatcher = prepared(Case(chunks=3), rank, world_size)
    layer.activation = activation
    if set(who) == {0, 1}:
        with pytest.raises(RuntimeError, match="had enough"):
            layer.call(dispatcher, leaves, dist.group.WORLD)
        check(Case(chunks=3), rank, world_size, dist.group.WORLD)
        layer.activation = None
        got = layer.fast(dispatcher, dist.group.WORLD)
        assert max(distance(got, layer.reference(dist.group.WORLD)).values()) < 1e-12
    else:
        layer.call(dispatcher, leaves, dist.group.WORLD)


def test_the_rank_that_raises_in_a_chunk_is_reported_first_and_nothing_hangs():
    outcomes = run_ranks(raise_in_a_chunk, 2, (1,), expect_failure=True, grace=HANG_S)
    assert [outcome.state for outcome in outcomes] == ["raised", "raised"]
    first = min(outcomes, key=lambda outcome: outcome.failed_at)
    assert first.rank == 1 and "rank 1 has had enough" in first.error and "in activation" in first.error


def test_a_step_after_one_that_raised_everywhere_meets_no_stale_state():
    run_ranks(raise_in_a_chunk, 2, (0, 1))
