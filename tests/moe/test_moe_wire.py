"""What goes over the wire: how many collectives, in which order, and waited for when."""

import itertools
import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launcher import run_ranks
from layer import Case, Layer, check, recomputed
from layer_cases import WAIT_CASES
from mindspeed_chunk import dist as wire
from mindspeed_chunk.config import KEEPS, SCHEDULES
from mindspeed_chunk.moe import executor
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.schedule import build, render, residency
from mindspeed_chunk.observe import observe
from mindspeed_chunk.ops import cpu
from wire import Counted, HeldWork, prepared


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
    for chunks, schedule, keep in itertools.product((1, 2, 3, 8), SCHEDULES, KEEPS):
        cases.append(Case(chunks=chunks, schedule=schedule, keep=keep))
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


def order_of_copy(rank, world_size):
    layer, leaves, dispatcher = prepared(Case(chunks=3), rank, world_size)
    with observe() as events:
        layer.call(dispatcher, leaves, dist.group.WORLD)
    return [e.name for e in events]


def test_the_first_permute_is_queued_before_the_host_copy_is_waited_for():
    """The gather is launched first and read as late as its figures are needed: by the first dispatch."""
    for names in run_ranks(order_of_copy, 2):
        assert names[:4] == ["plan", "P0", "plan", "D0"]


def test_agreement_is_made_once():
    """The first call costs one gather more, and two all-to-alls that check the wire."""
    steady = {"all_to_all": 8, "gather": 1, "other": 0}
    assert run_ranks(count_first_call, 2) == [[{"all_to_all": 10, "gather": 2, "other": 0}, steady, steady]] * 2


def record_actions(rank, world_size, cases):
    for case in cases:
        layer, leaves, dispatcher = prepared(case, rank, world_size)
        chunks, out = case.chunks, None
        for backward in (False, True):
            with observe() as events:
                out = out.backward(layer.grad) if backward else layer.call(dispatcher, leaves, dist.group.WORLD)
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
        Case(chunks=n, schedule=schedule, keep=keep, **change)
        for n, schedule, keep in itertools.product((1, 2, 3, 5, 8), SCHEDULES, KEEPS)
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
        Case(chunks=3, schedule=schedule, keep=keep, routing=routing, tokens=tokens, seed=seed)
        for seed, (schedule, keep, routing, tokens) in enumerate(
            itertools.product(SCHEDULES, KEEPS, ("random", "one_rank", "alternate"), ((9, 4, 0, 7), (5, 2), (0, 3)))
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


def test_rows_are_read_after_their_own_wait_and_send_buffers_live_until_then():
    run_ranks(hold_works, 2, WAIT_CASES, sabotage=False)


def test_a_missing_wait_is_seen():
    outcomes = run_ranks(hold_works, 2, WAIT_CASES[:1], sabotage=True, expect_failure=True)
    assert all("AssertionError" in outcome.error for outcome in outcomes if outcome.state == "raised")
    assert any(outcome.state == "raised" for outcome in outcomes)


def in_pieces(rank, world_size, cases):
    """All-to-alls of each case in pieces of at most two rows: the results of one message a peer, bit for bit."""
    counted = []
    for case in cases:
        layer, _, dispatcher = prepared(case, rank, world_size)
        expected = layer.fast(dispatcher, dist.group.WORLD)
        row = case.hidden * case.dtype.itemsize
        with mock.patch.object(wire, "GLOO_PIECE_BYTES", 2 * row), Counted() as counter:
            got = layer.fast(dispatcher, dist.group.WORLD)
            counted.append(counter.take())
        assert all(torch.equal(got[name], expected[name]) for name in expected), case
    return counted


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_large_messages_over_gloo_go_in_pieces_as_many_on_every_rank(ranks):
    cases = [
        Case(chunks=2),
        Case(chunks=3, routing="one_rank"),
        Case(chunks=2, tokens=(0, 9)),
        Case(chunks=2, padded=True),
        Case(chunks=2, keep="input"),
    ]
    first, *others = run_ranks(in_pieces, ranks, cases)
    assert all(counted == first for counted in others)
    for case, counted in zip(cases, first, strict=True):
        assert counted["all_to_all"] > 4 * case.chunks * (ranks - 1) and counted["gather"] == 1


def checkpointed(rank, world_size, cases):
    """A block with and without a checkpoint; the layer is the last of it to save anything, so recompute stops there."""
    for case in cases:
        layer, leaves, dispatcher = prepared(case, rank, world_size)

        def block(x, layer=layer, leaves=leaves, dispatcher=dispatcher):
            return layer.call(dispatcher, {**leaves, "x": x.sin()}, dist.group.WORLD).neg()

        inputs = list(leaves.values())
        plain = torch.autograd.grad(block(leaves["x"]), inputs, layer.grad)
        with Counted() as counter:
            again = torch.autograd.grad(recomputed(block, leaves["x"]), inputs, layer.grad)
            counts = counter.take()
        assert all(map(torch.equal, again, plain))
        assert counts == {"all_to_all": 6 * case.chunks, "gather": 1, "other": 0}


def test_early_stop_of_a_checkpoint_is_the_same_on_every_rank():
    cases = [
        Case(chunks=3, keep=keep, **change)
        for keep in KEEPS
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
