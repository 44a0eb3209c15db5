"""Plans: what each rank derives from the gathered counts, against counting by hand."""

import itertools

import pytest
import torch
import torch.distributed as dist

from launcher import run_ranks
from mindspeed_chunk.moe.plan import (
    ChunkSlices,
    Columns,
    Gather,
    PendingPlan,
    agree_num_chunks,
    merge_slices,
    plan_chunks,
    rank_slots,
    route,
)
from mindspeed_chunk.observe import observe
from mindspeed_chunk.ops import cpu


@pytest.mark.parametrize(
    "tokens, size, chunks, expected",
    [
        (7, 3, 3, [(0, 3), (3, 6), (6, 7)]),
        (2, 1, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 0, 2, [(0, 0), (0, 0)]),
        (5, 100, 1, [(0, 5)]),
        (5, 2, 5, [(0, 2), (2, 4), (4, 5), (5, 5), (5, 5)]),
    ],
)
def test_chunks_of_a_size_are_contiguous_slices_of_at_most_it(tokens, size, chunks, expected):
    assert [(s.start, s.stop) for s in ChunkSlices(tokens, chunks, size).slices] == expected


def test_chunks_of_a_number_are_equal_up_to_one_token():
    assert [(s.start, s.stop) for s in ChunkSlices(11, 4).slices] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    for tokens, chunks in itertools.product(range(40), (1, 2, 3, 4, 7, 16)):
        sizes = [s.stop - s.start for s in ChunkSlices(tokens, chunks).slices]
        assert len(sizes) == chunks and sum(sizes) == tokens and max(sizes) - min(sizes) <= 1
        finer = ChunkSlices(tokens, 3 * chunks).slices
        assert [s.start for s in finer[::3]] == [s.start for s in ChunkSlices(tokens, chunks).slices]


def test_every_token_is_counted_in_its_own_chunk():
    for cut in itertools.starmap(ChunkSlices, [(11, 4), (3, 8), (64, 5), (11, 4, 3), (5, 5, 2), (0, 3)]):
        expected = [c for c, part in enumerate(cut.slices) for _ in range(part.start, part.stop)]
        assert cut.chunk_of(torch.arange(cut.num_tokens)).tolist() == expected


def test_route_marks_what_is_out_of_range_and_what_is_padding():
    index = torch.tensor([[0, 3], [-7, 4], [99, 2]], dtype=torch.int32)
    assert route(index, 4, None).tolist() == [[0, 3], [-1, 4], [4, 2]]
    assert route(index, 4, torch.tensor([False, True, True])).tolist() == [[0, 3], [5, 5], [5, 5]]


def gather_of(index_TK, pad_T, num_chunks, num_experts, group=None, word=1, on_disagreement=None):
    route_TK = route(index_TK, num_experts, pad_T)
    cut = ChunkSlices(len(index_TK), num_chunks)
    columns = Columns(num_experts, dist.get_world_size(group) if group else 0)
    counts = cpu.count(columns.keys(route_TK, cut), num_chunks * columns.total)
    assert counts.dtype == torch.int64
    none = counts.new_zeros(1)
    return Gather(counts, columns, none, word, group, on_disagreement, on_rerouted=None)


def plan_of(index_TK, pad_T, num_chunks, num_experts, group=None, per_rank=False, **agreement):
    gather = gather_of(index_TK, pad_T, num_chunks, num_experts, group, **agreement)
    return PendingPlan(gather.read, ChunkSlices(len(index_TK), num_chunks).slices, group, per_rank)


def inputs_of(rank, tokens, num_experts, top_k):
    generator = torch.Generator().manual_seed(rank)
    index = torch.rand(tokens[rank], num_experts, generator=generator).topk(top_k).indices
    return index, torch.rand(tokens[rank], generator=generator) < 0.3


def check_plans(rank, world_size, chunks):
    return [check_plan(rank, world_size, num_chunks) for num_chunks in chunks]


def check_plan(rank, world_size, num_chunks):
    num_experts, top_k, tokens = 8, 3, (11, 4, 0, 7)[:world_size]
    local = num_experts // world_size
    everybody = [inputs_of(r, tokens, num_experts, top_k) for r in range(world_size)]
    with observe() as events:
        plan = plan_of(*everybody[rank], num_chunks, num_experts, dist.group.WORLD).wait()
    assert [(e.kind, e.name) for e in events] == [("all_gather", "plan"), ("host_copy", "plan")]

    def rows(source, chunk, expert):
        index, pad = everybody[source]
        part = slice(*(-(-c * tokens[source] // num_chunks) for c in (chunk, chunk + 1)))
        return int((index[part][~pad[part]] == expert).sum())

    for c, chunk in enumerate(plan):
        mine = range(rank * local, (rank + 1) * local)
        assert chunk.send_splits == tuple(
            sum(rows(rank, c, e) for e in range(peer * local, (peer + 1) * local)) for peer in range(world_size)
        )
        assert chunk.groups.counts == tuple(tuple(rows(source, c, e) for e in mine) for source in range(world_size))
        assert chunk.groups.on_device.tolist() == [list(row) for row in chunk.groups.counts]
        assert chunk.recv_splits == tuple(map(sum, chunk.groups.counts))
        assert chunk.groups.rows_per_expert == tuple(map(sum, zip(*chunk.groups.counts, strict=True)))
        assert chunk.num_sent == sum(chunk.send_splits)
        assert chunk.max_split == max(
            sum(rows(source, c, e) for e in range(peer * local, (peer + 1) * local))
            for source, peer in itertools.permutations(range(world_size), 2)
        )
    return [(chunk.send_splits, chunk.recv_splits) for chunk in plan]


@pytest.mark.parametrize("ranks", [2, 4])
def test_plan_is_what_counting_by_hand_gives(ranks):
    by_rank = run_ranks(check_plans, ranks, (1, 3))
    for plans in zip(*by_rank, strict=True):
        for c in range(len(plans[0])):
            sent, received = ([plan[c][i] for plan in plans] for i in (0, 1))
            assert sent == [tuple(column) for column in zip(*received, strict=True)]  # from a to b, as b from a


def check_plans_per_rank(rank, world_size, chunks):
    num_experts, tokens = 8, (11, 4, 0, 7)[:world_size]
    local = num_experts // world_size
    everybody = [inputs_of(r, tokens, num_experts, 3) for r in range(world_size)]

    def once(source, chunk, num_chunks, peer):
        index, pad = everybody[source]
        part = slice(*(-(-c * tokens[source] // num_chunks) for c in (chunk, chunk + 1)))
        return int((index[part][~pad[part]] // local == peer).any(1).sum())

    for num_chunks in chunks:
        inputs = (*everybody[rank], num_chunks, num_experts, dist.group.WORLD)
        each, plan = plan_of(*inputs).wait(), plan_of(*inputs, per_rank=True).wait()
        for c, chunk in enumerate(plan):
            assert chunk.send_splits == tuple(once(rank, c, num_chunks, peer) for peer in range(world_size))
            assert chunk.recv_splits == tuple(once(source, c, num_chunks, rank) for source in range(world_size))
            assert chunk.groups.counts == (each[c].groups.rows_per_expert,)
            assert chunk.groups.on_device.tolist() == [list(each[c].groups.rows_per_expert)]
            pairs = itertools.permutations(range(world_size), 2)
            assert chunk.max_split == max(once(source, c, num_chunks, peer) for source, peer in pairs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plan_per_rank_counts_a_token_once_for_each_rank(ranks):
    run_ranks(check_plans_per_rank, ranks, (1, 3))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_slots_name_each_rank_of_a_token_once(ranks):
    generator = torch.Generator().manual_seed(ranks)
    for top_k in (1, 2, 3, 5):
        route_TK = torch.randint(-1, 10, (50, top_k), generator=generator)  # -1 and 8 are out of range, 9 is padding
        slots_TD = rank_slots(route_TK, 8, ranks)
        assert slots_TD.shape == (50, min(top_k, ranks))
        for routes, slots in zip(route_TK.tolist(), slots_TD.tolist(), strict=True):
            wanted = sorted({n * ranks // 8 for n in routes if 0 <= n < 8})
            assert sorted(slots) == wanted + [ranks] * (len(slots) - len(wanted))


def test_plan_without_a_group_needs_no_process_group():
    index, pad = inputs_of(0, (11,), 8, 3)
    with observe() as events:
        (chunk,) = plan_of(index, pad, 1, 8).wait()
    assert [e.kind for e in events] == ["host_copy"]
    assert chunk.send_splits == chunk.recv_splits == (int((~pad).sum()) * 3,)


def merged_plans(rank, world_size):
    inputs = inputs_of(rank, (11, 4), 8, 3)
    counts = gather_of(*inputs, 6, 8, dist.group.WORLD).read()
    slices = ChunkSlices(len(inputs[0]), 6).slices
    fine, once = (plan_chunks(counts, slices, rank, per_rank) for per_rank in (False, True))
    for chunks, per_rank in itertools.product((1, 2, 3, 6), (False, True)):
        tokens, run = merge_slices(slices, chunks), 6 // chunks
        coarse = plan_chunks(counts.merged(chunks), tokens, rank, per_rank)
        assert tokens == tuple(chunk.tokens for chunk in coarse) and len(coarse) == chunks
        for c, chunk in enumerate(coarse):
            parts = (once if per_rank else fine)[c * run : (c + 1) * run]
            assert (chunk.tokens.start, chunk.tokens.stop) == (parts[0].tokens.start, parts[-1].tokens.stop)
            for field in ("send_splits", "recv_splits"):
                assert getattr(chunk, field) == tuple(map(sum, zip(*(getattr(part, field) for part in parts))))
            assert torch.equal(chunk.groups.on_device, sum(part.groups.on_device for part in parts))
            assert chunk.groups.on_device.tolist() == [list(row) for row in chunk.groups.counts]


def test_neighbouring_chunks_of_a_plan_can_be_merged():
    run_ranks(merged_plans, 2)


def test_plan_is_read_once():
    index, pad = inputs_of(0, (11,), 8, 3)
    with observe() as events:
        pending = plan_of(index, pad, 2, 8)
        assert pending.wait() is pending.wait()
    assert [event.kind for event in events] == ["host_copy"]


class Disagreed(Exception):
    pass


def disagree():
    raise Disagreed


@pytest.mark.parametrize("word, raises", [(7, False), (0, False), (-1, True)])
def test_a_negative_word_is_a_disagreement(word, raises):
    index, pad = inputs_of(0, (11,), 8, 3)
    pending = plan_of(index, pad, 2, 8, word=word, on_disagreement=disagree)
    if raises:
        with pytest.raises(Disagreed):
            pending.wait()
    else:
        pending.wait()


def nums_of_chunks(rank, world_size, cases):
    found = []
    for tokens, size in cases:
        with observe() as events:
            chunks = agree_num_chunks(tokens[rank], size, dist.group.WORLD, torch.device("cpu"))
        assert [e.kind for e in events] == ["all_reduce", "host_copy"]
        found.append(chunks)
    return found


def test_the_rank_with_most_tokens_decides_the_number_of_chunks():
    cases = [((13, 2), 4), ((0, 0), 4), ((3, 9), 9)]
    assert run_ranks(nums_of_chunks, 2, cases) == [[4, 1, 1]] * 2
    assert agree_num_chunks(13, 4, None, torch.device("cpu")) == 4
