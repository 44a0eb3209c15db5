"""The number of chunks that the counts decide: chosen once, the same on every rank, more where rows pile up."""

import dataclasses
import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launcher import run_ranks
from layer import TOLERANCE, Case, Layer, distance, recomputed
from mindspeed_chunk import log
from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.moe import auto
from mindspeed_chunk.moe.auto import NumChunks, busiest_rows, received
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.observe import observe
from mindspeed_chunk.planner import Device, Link

COUNTS = torch.randint(0, 9, (2, 4, 6), generator=torch.Generator().manual_seed(0))  # [ranks, slices, experts]


def device(link_rate, flops=1e9):
    link = Link(rate=link_rate)
    return Device(name="test", memory=1e9, flops={"torch.float64": flops}, memory_rate=1e9, intra=link, inter=link)


def test_busiest_rows_the_busiest_rank_by_hand():
    for chunks in (1, 2, 4):
        run = 4 // chunks
        by_hand = []
        for c in range(chunks):
            part = COUNTS[:, c * run : (c + 1) * run].sum(1)  # [ranks, experts]
            to_rank = [int(part[:, :3].sum()), int(part[:, 3:].sum())]
            assert received(COUNTS, chunks)[c].tolist() == to_rank
            sent = int(part.sum(1).max())
            by_hand.append((-(-sent // 3), sent, max(to_rank), int(part.sum(0).max())))
        assert list(map(tuple, busiest_rows(COUNTS, chunks, 3))) == by_hand


@pytest.mark.parametrize(
    "settings, slices",
    [
        ({}, 1),
        ({"moe_num_chunks": 3}, 3),
        ({"chunk_moe_auto": True}, 16),
        ({"moe_num_chunks": 3, "chunk_moe_max_rows": 5}, 24),
        ({"moe_num_chunks": 20, "chunk_moe_max_rows": 5}, 20),
    ],
)
def test_rows_are_counted_as_finely_as_the_choice_needs(settings, slices):
    assert NumChunks(ChunkMoEConfig(**settings)).slices == slices


def test_a_slow_link_takes_more_chunks_than_a_fast_one_and_the_reason_is_told(caplog):
    layer = Layer(Case(tokens=(256,), hidden=32, intermediate=24))
    chosen, calls = {}, []
    for name, rate in (("fast", 1e15), ("even", 2e8)):
        dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(chunk_moe_auto=True))
        arguments = mock.Mock(
            selected_experts=layer.index, compute_dtype=torch.float64, x_TH=layer.x, fc2_width=24, num_experts=8,
            group=None,
        )  # fmt: skip
        counts = torch.full((2, 16, 8), 96)
        log._said.clear()
        with (
            mock.patch.object(auto, "measure", lambda *_, rate=rate: calls.append(1) or device(rate)),
            caplog.at_level(logging.INFO, logger="mindspeed_chunk"),
        ):
            chosen[name] = dispatcher._num_chunks.choose(counts, arguments, None)
            assert dispatcher._num_chunks.choose(counts * 3, arguments, None) == chosen[name]
    assert chosen["fast"] == 1 < chosen["even"] and len(calls) == 2
    first, second = (record.getMessage() for record in caplog.records if "chunk_moe_auto" in record.getMessage())
    assert "chunk_moe_auto: 1 chunks" in first and f"chunk_moe_auto: {chosen['even']} chunks" in second
    assert all(f"N={n} " in second for n in auto.CANDIDATES)


def train(rank, world_size, settings, routings):
    """Each call's distance to the reference, how many chunks it had, and its collectives by name."""
    group = dist.group.WORLD if world_size > 1 else None
    dispatcher, told = ChunkMoEDispatcher(ChunkMoEConfig(**settings)), []
    for routing in routings:
        layer = Layer(Case(tokens=(37, 24), routing=routing), rank, world_size)
        with observe() as events:
            got = layer.fast(dispatcher, group)
        worst = max(distance(got, layer.reference(group)).values())
        chunks = sum(event.kind == "action" and event.name.startswith("E") for event in events) // 2
        told.append((worst, chunks, [event.name for event in events if event.name in ("rates", "plan")]))
    return told


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_chosen_at_the_first_call_and_kept(ranks):
    routings = ("random", "one_rank", "alternate")
    by_rank = run_ranks(train, ranks, {"chunk_moe_auto": True}, routings)
    for calls in zip(*by_rank, strict=True):
        assert len({chunks for _, chunks, _ in calls}) == 1
        assert max(worst for worst, _, _ in calls) <= TOLERANCE[torch.float64]
    first, *later = by_rank[0]
    assert "rates" in first[2] and not any("rates" in names for _, _, names in later)
    assert len({chunks for _, chunks, _ in by_rank[0]}) == 1


def test_more_chunks_where_rows_pile_up_and_only_there():
    """61 tokens with 3 experts each are 183 rows: half of them are at a rank's experts, or all."""
    settings = {"moe_num_chunks": 2, "chunk_moe_max_rows": 60}
    for told in run_ranks(train, 2, settings, ("balanced", "one_rank", "balanced")):
        assert max(worst for worst, _, _ in told) <= TOLERANCE[torch.float64]
        assert [chunks for _, chunks, _ in told] == [2, 4, 2]


def test_a_cap_that_cannot_be_kept_is_told(caplog):
    chunks = NumChunks(ChunkMoEConfig(moe_num_chunks=2, chunk_moe_max_rows=1))
    for _ in range(4):
        assert chunks.choose(COUNTS, None, None) == 4
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and "chunk_moe_max_rows: 1: one of 4 chunks has" in lines[0] and "(time 4)" in lines[2]


def test_a_call_without_rows_or_without_a_backward_settles_nothing():
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(chunk_moe_auto=True))
    got = Layer(dataclasses.replace(Case(), tokens=(0,))).fast(dispatcher)
    assert got["out"].shape == (0, 10) and got["fc1"].abs().max() == 0
    layer = Layer(Case())
    with torch.no_grad():
        layer.call(dispatcher, {"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    assert dispatcher._num_chunks.settled is None
    layer.fast(dispatcher)
    assert dispatcher._num_chunks.settled in auto.CANDIDATES


def first_call_under_a_checkpoint(rank, world_size):
    """Its recompute keeps to the chunks that were chosen behind the forward's first counts."""
    layer, group = Layer(Case(tokens=(37, 24)), rank, world_size), dist.group.WORLD
    slow = device(2e8 if rank == 0 else 1e3)  # as if measured differently: the ranks still agree
    local = {"fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, **local})
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(chunk_moe_auto=True))
    with mock.patch.object(auto, "measure", lambda *_: slow):
        out = recomputed(lambda x: layer.call(dispatcher, {**leaves, "x": x}, group), leaves["x"])
        out.backward(layer.grad)
    worst = max(distance(layer._results(out, leaves), layer.reference(group)).values())
    return worst, dispatcher._num_chunks.settled


def test_the_first_call_may_be_recomputed_and_ranks_agree_whatever_they_measured():
    (worst, chosen), (other_worst, other) = run_ranks(first_call_under_a_checkpoint, 2)
    assert max(worst, other_worst) <= TOLERANCE[torch.float64] and chosen == other > 1
