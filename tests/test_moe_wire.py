"""What goes over the wire: how many collectives, in which order, waited for when; and what ranks do when one is wrong."""

import dataclasses
import itertools
import random
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from launcher import run_ranks
from layer import Case, Layer, check, distance
from torch.utils.checkpoint import checkpoint

from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.moe import executor
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.schedule import build, render, residency
from mindspeed_chunk.observe import observe
from mindspeed_chunk.ops import cpu

COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_gather", "broadcast")


class Counted:
    """Counts the calls of torch.distributed itself, under the names that do the work."""

    def __enter__(self):
        self.calls, self.originals = [], {}
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self.originals[name] = getattr(dist, name)
                setattr(dist, name, self._counting(name, self.originals[name]))
        return self

    def _counting(self, name, original):
        def call(*args, **kwargs):
            self.calls.append(name)
            return original(*args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def take(self):
        counted = {"all_to_all": 0, "gather": 0, "other": 0}
        for name in self.calls:
            key = {"all_to_all_single": "all_to_all"}.get(name, "gather" if name.startswith("all_gather_") else "other")
            counted[key] += 1
        self.calls.clear()
        return counted


def prepared(case, rank, world_size):
    """A layer, its leaves, and a dispatcher whose one-time agreement is behind it."""
    layer = Layer(case, rank, world_size)
    leaves = layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )
    dispatcher = ChunkMoEDispatcher(case.config(), weight_layout=case.layout)
    layer.call(dispatcher, leaves, dist.group.WORLD)
    return layer, leaves, dispatcher


def count_collectives(rank, world_size, cases):
    counted = []
    for case in cases:
        layer, leaves, dispatcher = prepared(case, rank, world_size)
        with Counted() as counter, observe() as events:
            out = layer.call(dispatcher, leaves, dist.group.WORLD)
            forward = counter.take() | {"host_copy": sum(e.kind == "host_copy" for e in events)}
            events.clear()
            if out.requires_grad:
                out.backward(layer.grad)
            counted.append((forward, counter.take() | {"host_copy": sum(e.kind == "host_copy" for e in events)}))
    return counted


def test_collectives_and_host_copies_of_a_call():
    """1 gather, 1 host copy and 2N all-to-alls forward, 2N backward; recompute of experts adds none."""

    def expected(forward, backward, gather=1, host_copy=1, other=0):
        return (
            {"all_to_all": forward, "gather": gather, "other": other, "host_copy": host_copy},
            {"all_to_all": backward, "gather": 0, "other": 0, "host_copy": 0},
        )

    cases, wanted = [], []
    for chunks, schedule, recompute in itertools.product((1, 2, 3, 8), ("rolling", "pair"), (False, True)):
        cases.append(Case(chunks=chunks, schedule=schedule, recompute=recompute))
        wanted.append(expected(2 * chunks, 2 * chunks))
    cases += [
        Case(chunks=0, chunk_size=4),  # 13 and 9 tokens: 4 chunks
        Case(chunks=3, frozen=("x", "weight")),
        Case(chunks=3, frozen=("x", "fc1", "fc2")),
        Case(chunks=3, frozen=("x", "weight", "fc1", "fc2")),
        Case(chunks=3, padded=True, routing="one_rank"),
    ]
    wanted += [expected(8, 8, host_copy=2, other=1), expected(6, 3), expected(6, 6), expected(6, 0), expected(6, 6)]
    for counted in run_ranks(count_collectives, 2, cases):
        assert counted == wanted


def count_first_call(rank, world_size):
    layer = Layer(Case(chunks=2), rank, world_size)
    dispatcher, counts = ChunkMoEDispatcher(layer.case.config()), []
    for _ in range(3):
        with Counted() as counter:
            layer.fast(dispatcher, dist.group.WORLD)
            counts.append(counter.take())
    return counts


def test_agreement_is_made_once():
    """The first call costs one gather more, and two all-to-alls that check the wire."""
    steady = {"all_to_all": 8, "gather": 1, "other": 0}
    assert run_ranks(count_first_call, 2) == [[{"all_to_all": 10, "gather": 2, "other": 0}, steady, steady]] * 2


def record_actions(rank, world_size, cases):
    for case in cases:
        layer, leaves, dispatcher = prepared(case, rank, world_size)
        chunks = case.chunks
        for backward in (False, True):
            with observe() as events:
                if backward:
                    out.backward(layer.grad)  # noqa: F821
                else:
                    out = layer.call(dispatcher, leaves, dist.group.WORLD)
            actions = [e for e in events if e.kind == "action"]
            schedule = build(case.schedule, chunks, backward=backward)
            assert " ".join(e.name for e in actions) == render(schedule)
            # what the executor holds, counted on its own buffers and handles, is what the schedule promises
            held = [(e.detail["in_flight"], e.detail["owners"]) for e in actions]
            assert held == residency(schedule), (case, backward, held)
            assert max(in_flight for in_flight, _ in held) <= 2 and max(owners for _, owners in held) <= 3
            exchanges = [e.name for e in events if e.kind == "all_to_all"]
            assert exchanges == [str(a) for a in schedule if a.kind in "DC"]


def test_record_of_the_executor_is_the_schedule_and_stays_within_its_residency():
    cases = [
        Case(chunks=n, schedule=schedule, recompute=recompute, **change)
        for n, schedule, recompute in itertools.product((1, 2, 3, 5, 8), ("rolling", "pair"), (False, True))
        for change in ({}, {"routing": "one_rank"}, {"padded": True})
    ]
    run_ranks(record_actions, 2, cases)


def trace(rank, world_size, cases, naps):
    """Events of every call, with this rank's kernels asleep at random."""
    nap, original = random.Random(rank), cpu.grouped_mm

    def sleepy(*args, **kwargs):
        time.sleep(nap.random() * naps[rank])
        return original(*args, **kwargs)

    cpu.grouped_mm = sleepy
    found = []
    for case in cases:
        with observe() as events:
            check(case, rank, world_size, dist.group.WORLD)
        found += [(e.kind, e.name, e.detail) for e in events if e.kind.startswith("all_")]
    return found


def test_same_collectives_in_the_same_order_with_matching_sizes_on_every_rank():
    """Skewed routing, uneven tokens, and one rank that sleeps at random."""
    cases = [
        Case(chunks=3, schedule=schedule, recompute=recompute, routing=routing, tokens=tokens, seed=seed)
        for seed, (schedule, recompute, routing, tokens) in enumerate(
            itertools.product(
                ("rolling", "pair"), (False, True), ("random", "one_rank", "alternate"), ((9, 4, 0, 7), (5, 2), (0, 3))
            )
        )
    ]
    traces = run_ranks(trace, 4, cases, naps=(0.004, 0.0, 0.001, 0.0))
    for events in zip(*traces, strict=True):
        assert len({(kind, name) for kind, name, _ in events}) == 1
        details = [detail for _, _, detail in events]
        if "send" in details[0]:
            assert [tuple(column) for column in zip(*(d["recv"] for d in details), strict=True)] == [
                d["send"] for d in details
            ]
            assert len({d["row_bytes"] for d in details}) == 1
        else:
            assert len({d["elements"] for d in details}) == 1


class HeldWork:
    """An all-to-all whose rows arrive at `wait()` and no sooner; it also sees what became of the send buffer."""

    original = None
    waits = 0

    def __init__(self, output, rows, output_split_sizes, input_split_sizes, group, async_op):
        assert async_op
        self.output, self.rows, self.sent = output, weakref.ref(rows), rows.clone()
        self.arrived = torch.empty_like(output)
        type(self).original(self.arrived, rows, output_split_sizes, input_split_sizes, group=group)
        output.view(torch.uint8).fill_(0xFF)  # NaN in every dtype

    def wait(self):
        rows = self.rows()
        assert rows is not None, "the send buffer was freed before the wait"
        assert torch.equal(rows.view(torch.uint8), self.sent.view(torch.uint8)), "it was written to before the wait"
        self.output.copy_(self.arrived)
        type(self).waits += 1


def hold_works(rank, world_size, cases, sabotage):
    HeldWork.original, dist.all_to_all_single = dist.all_to_all_single, HeldWork
    if sabotage:

        def without_waiting(chunk):
            received, chunk.received, chunk.send, chunk.work = chunk.received, None, None, executor.DONE
            return received

        executor._Chunk.arrived = without_waiting
    for case in cases:
        before = HeldWork.waits
        check(case, rank, world_size, dist.group.WORLD)
        assert HeldWork.waits - before == 4 * case.chunks + 2  # and every work is waited for


WAIT_CASES = [
    Case(chunks=n, schedule=schedule, recompute=recompute, dtype=dtype)
    for n, schedule, recompute, dtype in itertools.product(
        (1, 2, 3, 5), ("rolling", "pair"), (False, True), (torch.float64, torch.bfloat16)
    )
]


def test_rows_are_read_after_their_own_wait_and_send_buffers_live_until_then():
    run_ranks(hold_works, 2, WAIT_CASES, sabotage=False)


def test_a_missing_wait_is_seen():
    outcomes = run_ranks(hold_works, 2, WAIT_CASES[:1], sabotage=True, expect_failure=True)
    assert all("AssertionError" in outcome.error for outcome in outcomes if outcome.state == "raised")
    assert any(outcome.state == "raised" for outcome in outcomes)


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
        "num_experts: 8 on rank 0, 4 on rank 1": {"experts": 4},
        "experts a token: 3 on rank 0, 2 on rank 1": {"top_k": 2},
        "hidden size: 10 on rank 0, 6 on rank 1": {"hidden": 6},
        "dtype of the rows: torch.float64 on rank 0, torch.float32 on rank 1": {"dtype": torch.float32},
        "dtype of the router weights: torch.float64 on rank 0, torch.float32": {"router_dtype": torch.float32},
        "needs an input gradient: True on rank 0, False on rank 1": {"frozen": ("x", "weight")},
        "must be divisible by the size of the expert-parallel group, 2": {"experts": 7},
    }
    cases = [(base, dataclasses.replace(base, **change)) for change in changes.values()]
    first, second = run_ranks(disagree, 2, cases, timeout=60)
    assert first == second
    for wanted, message in zip(changes, first, strict=True):
        assert message is not None and wanted in message and "\n" not in message, (wanted, message)


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
    ]
    messages = []
    for change in changes:
        with pytest.raises(ValueError) as caught:
            dispatcher(**(good | change if rank == 1 else good))
        messages.append(str(caught.value))
        dispatcher(**good).backward(layer.grad)
    return messages


def test_a_rank_that_goes_wrong_later_is_told_to_all_of_them_too():
    first, second = run_ranks(disagree_later, 2, timeout=60)
    assert first == second
    wanted = [
        "needs an input gradient: True on rank 0, False on rank 1",
        "dtype of the router weights: torch.float64 on rank 0, torch.float32 on rank 1",
        "rank 1: selected_experts: shape",
        "rank 1: fc1_weight, fc2_weight: shapes",
        "on rank 1 of the ids are outside [0, 8)",
        "rank 1: seq_mask: None",
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
    start = time.monotonic()
    outcomes = run_ranks(raise_in_a_chunk, 2, (1,), expect_failure=True, timeout=60, grace=10)
    assert time.monotonic() - start < 30
    first = min(outcomes, key=lambda outcome: outcome.failed_at)
    assert first.rank == 1 and "rank 1 has had enough" in first.error and "in activation" in first.error


def test_a_step_after_one_that_raised_everywhere_meets_no_stale_state():
    run_ranks(raise_in_a_chunk, 2, (0, 1), timeout=60)


def checkpointed(rank, world_size, cases):
    """A block with and without a checkpoint; the layer is the last of it to save anything, so recompute stops there."""
    for case in cases:
        layer, leaves, dispatcher = prepared(case, rank, world_size)

        def block(x, layer=layer, leaves=leaves, dispatcher=dispatcher):
            return layer.call(dispatcher, {**leaves, "x": x.sin()}, dist.group.WORLD).neg()

        inputs = list(leaves.values())
        plain = torch.autograd.grad(block(leaves["x"]), inputs, layer.grad)
        with Counted() as counter:
            again = torch.autograd.grad(checkpoint(block, leaves["x"], use_reentrant=False), inputs, layer.grad)
            counts = counter.take()
        assert all(map(torch.equal, again, plain))
        assert counts == {"all_to_all": 6 * case.chunks, "gather": 2, "other": 0}


def test_early_stop_of_a_checkpoint_is_the_same_on_every_rank():
    cases = [
        Case(chunks=3, recompute=recompute, **change)
        for recompute in (False, True)
        for change in ({}, {"tokens": (9, 0)}, {"routing": "one_rank"}, {"routing": "alternate", "tokens": (12,)})
    ]
    run_ranks(checkpointed, 2, cases)


def profiled(rank, world_size):
    layer, leaves, dispatcher = prepared(Case(chunks=2), rank, world_size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer.call(dispatcher, leaves, dist.group.WORLD).backward(layer.grad)
    return sorted({e.key.removeprefix("chunkmoe::") for e in profile.key_averages() if e.key.startswith("chunkmoe::")})


def test_profiler_ranges_carry_the_names_of_the_actions():
    names = sorted({str(action) for action in build("rolling", 2, backward=True)})
    assert run_ranks(profiled, 2) == [names] * 2
