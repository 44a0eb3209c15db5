"""A dispatch per rank: what is sent, what stays in its token, how it rounds, and when it is chosen."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from launcher import run_ranks
from layer import Case, Layer, check, distance
from mindspeed_chunk.config import KEEPS
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.moe.costs.rows import LayerShape, ranks_per_token, row_bytes, share_of_bytes
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.observe import observe

NAMES = ("x", "weight", "fc1", "fc2")
FROZEN = [names for n in range(5) for names in itertools.combinations(NAMES, n)]


def check_all(rank, world_size, cases):
    for case in cases:
        check(case, rank, world_size, dist.group.WORLD)


def test_every_combination_of_frozen_parts_in_every_keep_mode():
    cases = [Case(dispatch="per_rank", chunks=2, keep=keep, frozen=frozen) for keep in KEEPS for frozen in FROZEN]
    run_ranks(check_all, 2, cases)


def sent_rows(rank, world_size, cases):
    """Rows and bytes per exchange, and the tokens of each rank's choices, from the events of one call."""
    results = []
    for case in cases:
        layer = Layer(case, rank, world_size)
        dispatcher = ChunkMoEDispatcher(case.config())
        layer.fast(dispatcher, dist.group.WORLD)
        with observe() as events:
            layer.fast(dispatcher, dist.group.WORLD)
        exchanges = [(sum(e.detail["send"]), sum(e.detail["recv"]), e.detail["row_bytes"]) for e in events
                     if e.kind == "all_to_all"]  # fmt: skip
        local = case.experts // world_size
        wanted = sum(len({n // local for n in token}) for token in layer.index.tolist())
        results.append((exchanges, wanted))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_token_is_sent_once_to_each_rank_with_experts_of_it(ranks):
    cases = [
        Case(dispatch="per_rank", chunks=chunks, keep=keep, hidden=512, top_k=4, dtype=torch.float32, tokens=(33, 20))
        for chunks, keep in itertools.product((1, 4), KEEPS)
    ]
    for case, *of_ranks in zip(cases, *run_ranks(sent_rows, ranks, cases), strict=True):
        wanted = [tokens for _, tokens in of_ranks]
        for (exchanges, sent), arrived in zip(of_ranks, _arrived(case, ranks), strict=True):
            count = len(exchanges) // 4
            for direction in (exchanges[: 2 * count], exchanges[2 * count :]):
                out = [e for e in direction if e[2] == direction[0][2]]
                back = [e for e in direction if e[2] != direction[0][2]]
                assert len(out) == len(back) == count
                assert sum(e[0] for e in out) == sum(e[1] for e in back) == sent
                assert sum(e[1] for e in out) == sum(e[0] for e in back) == arrived
            shape = LayerShape(
                tokens=1, hidden=512, intermediate=1, experts=8, top_k=4, ep=ranks, element_size=4, dispatch="per_rank"
            )
            assert {e[2] for e in exchanges} == set(row_bytes(shape, case.keep))
        assert sum(wanted) == sum(_arrived(case, ranks))


def _arrived(case, ranks):
    local = case.experts // ranks
    tokens = [token for rank in range(ranks) for token in Layer(case, rank, ranks).index.tolist()]
    return [sum(any(n // local == rank for n in token) for token in tokens) for rank in range(ranks)]


def test_ids_and_weights_are_at_most_2_5_percent_of_the_bytes():
    for hidden, top_k, size in ((512, 4, 4), (2048, 8, 2), (4096, 8, 2)):
        shape = LayerShape(
            tokens=1, hidden=hidden, intermediate=1, experts=64, top_k=top_k, ep=2, element_size=size,
            dispatch="per_rank",
        )  # fmt: skip
        assert sum(row_bytes(shape, "activations")) <= 1.025 * 4 * hidden * size


def spoilt(rank, world_size, keep):
    """Which tokens' results are not finite if one token of rank 0 is not: (output, its gradient of x)."""
    results = []
    for value in (math.nan, math.inf):
        layer = Layer(Case(dispatch="per_rank", chunks=2, keep=keep, top_k=3), rank, world_size)
        if rank == 0:
            layer.x[4] = value
        got = layer.fast(group=dist.group.WORLD)
        results.append([(~got[name].isfinite()).any(1).nonzero().flatten().tolist() for name in ("out", "x")])
    return results


@pytest.mark.parametrize("keep", KEEPS)
def test_a_nan_or_inf_stays_in_its_token(keep):
    first, second = run_ranks(spoilt, 2, keep)
    assert all(tokens in ([4], []) for result in first for tokens in result)
    assert all(result[0] == [4] for result in first)
    assert second == [[[], []]] * 2


def twice(rank, world_size, keep):
    """Tokens that name one expert twice, against the same layer per expert."""
    results = {}
    for dispatch in ("per_expert", "per_rank"):
        layer = Layer(Case(dispatch=dispatch, chunks=3, keep=keep, top_k=3), rank, world_size)
        layer.index[::2, 1] = layer.index[::2, 0]
        layer.index[1] = 5
        results[dispatch] = layer.fast(group=dist.group.WORLD)
    return max(distance(results["per_rank"], results["per_expert"]).values())


@pytest.mark.parametrize("keep", KEEPS)
def test_one_expert_twice_in_the_choice_of_a_token(keep):
    assert max(run_ranks(twice, 2, keep)) < 1e-12


def bf16_errors(rank, world_size, top_k, router_dtype, seeds):
    """Root mean squares of the errors in bf16, per dispatcher and result, summed over seeds."""
    squares = {"plain": {}, "per_rank": {}}
    for seed in range(seeds):
        sizes = {"tokens": (48,), "hidden": 64, "intermediate": 32, "experts": 16, "top_k": top_k, "seed": seed}
        case = Case(dispatch="per_rank", chunks=2, dtype=torch.bfloat16, router_dtype=router_dtype, **sizes)
        layer = Layer(case, rank, world_size)
        truth = layer.reference(dist.group.WORLD, torch.float64)
        for name, dispatcher in (("plain", AllToAllDispatcher()), ("per_rank", None)):
            for result, value in layer.fast(dispatcher, dist.group.WORLD).items():
                error = (value.double() - truth[result]).pow(2).mean().item()
                squares[name][result] = squares[name].get(result, 0.0) + error
    return squares


@pytest.mark.parametrize("top_k", [4, 8])
@pytest.mark.parametrize("router_dtype, bound", [(torch.bfloat16, 1.15), (torch.float32, 1.25)], ids=str)
def test_bf16_is_as_near_to_the_truth_as_the_plain_dispatcher(top_k, router_dtype, bound, record_property):
    results = run_ranks(bf16_errors, 2, top_k, router_dtype, 20)
    for name in results[0]["plain"]:
        plain, once = (sum(result[kind][name] for result in results) ** 0.5 for kind in ("plain", "per_rank"))
        record_property(f"bf16 error per rank over plain, K={top_k}, {router_dtype}, {name}", f"{once / plain:.3f}")
        assert once <= bound * plain, (name, once / plain)


def differing(rank, world_size):
    case = Case(dispatch=("per_rank", "per_expert")[rank], chunks=2)
    with pytest.raises(ValueError, match="chunk_moe_dispatch: per_rank on rank 0, per_expert on rank 1"):
        Layer(case, rank, world_size).fast(group=dist.group.WORLD)


def test_ranks_that_dispatch_differently_are_refused():
    run_ranks(differing, 2)


def test_the_expected_number_of_ranks_is_that_of_drawn_tokens():
    for experts, top_k, ranks in ((16, 4, 2), (64, 8, 2), (256, 8, 8), (8, 3, 4)):
        drawn = torch.rand(20000, experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
        counted = (drawn[:, :, None] * ranks // experts == torch.arange(ranks)).any(1).sum(1).double().mean().item()
        assert ranks_per_token(experts, top_k, ranks) == pytest.approx(counted, rel=0.01)
    assert ranks_per_token(4, 5, 2) == 2  # more choices than experts
    assert ranks_per_token(8, 8, 4) == 4 and ranks_per_token(8, 1, 8) == 1


def test_the_share_of_the_bytes():
    shape = LayerShape(tokens=1, hidden=2048, intermediate=1, experts=256, top_k=8, ep=8, element_size=2)
    assert 0.66 < share_of_bytes(shape, 4) < 0.68
    wide = LayerShape(**{**vars(shape), "ep": 128})
    assert share_of_bytes(wide, 4) > 0.95


def chosen(rank, world_size, cases):
    kinds = []
    for case in cases:
        layer = Layer(case, rank, world_size)
        with observe() as events:
            layer.fast(group=dist.group.WORLD)
        first = next(e for e in events if e.kind == "all_to_all" and e.name == "D0")
        kinds.append("per_expert" if first.detail["row_bytes"] == case.hidden * 8 else "per_rank")
    return kinds


def test_auto_sends_per_rank_where_it_saves_bytes_and_per_expert_elsewhere():
    cases = [
        Case(hidden=64, experts=16, top_k=4),
        Case(hidden=64, experts=16, top_k=1),
        Case(hidden=64, experts=16, top_k=1, dispatch="per_rank"),
        Case(hidden=2, top_k=2),
        Case(hidden=2, top_k=2, dispatch="per_rank"),
        Case(hidden=64, experts=16, top_k=4, dispatch="per_expert"),
    ]
    wanted = ["per_rank", "per_expert", "per_expert", "per_expert", "per_rank", "per_expert"]
    assert run_ranks(chosen, 2, cases) == [wanted] * 2
