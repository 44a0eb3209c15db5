"""Traffic on the links and what it costs a step, with values by hand."""

import dataclasses

import pytest

from mindspeed_chunk.hardware import ALL_GATHER, ALL_TO_ALL, GroupShape, Link, LinkSeconds, collective_seconds
from mindspeed_chunk.planner import RECIPES, LayerShape, exchanges, load_device, load_model
from mindspeed_chunk.planner.compare.megatron import MEGATRON, Megatron
from mindspeed_chunk.planner.estimate import Estimator
from mindspeed_chunk.planner.layout import Layout
from mindspeed_chunk.planner.sequence import ulysses_traffic
from mindspeed_chunk.planner.setting import Job, Setting

H100, ASCEND = load_device("h100"), load_device("ascend-910c")


def job(device=H100, model="35b", nodes=8, devices=8, **more):
    more = {"recipe": RECIPES["bf16-fsdp2"], "global_batch": 256, **more}
    return Job(model=load_model(model), device=device, nodes=nodes, devices_per_node=devices, **more)


def between(collective, span, device):
    """Seconds on the link between nodes by the table in `hardware.py`, for groups with as many ranks on each node."""
    n, d = span
    share = (n - d) / n if collective.kind == ALL_TO_ALL else (1 - d / n) / d
    return collective.nbytes * share / device.inter.rate


SPANS = {"dp_cp": (64, 8), "ep": (16, 8), "edp": (4, 1)}


@pytest.mark.parametrize("device", [H100, ASCEND], ids=["h100", "ascend-910c"])
@pytest.mark.parametrize("batch", [(2, 2), (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_step_is_not_shorter_than_its_busiest_link(device, batch, policy):
    micro_batch, accumulation = batch
    setting = Setting(
        layout=Layout(ep=16, dp=64), micro_batch=micro_batch, accumulation=accumulation, num_chunks=4, policy=policy
    )
    estimator = Estimator(job(device))
    found = estimator(setting)
    by_hand = sum(between(each, SPANS[each.group], device) for each in estimator.traffic(setting))
    assert found.links.between == pytest.approx(by_hand, rel=1e-3)
    assert found.step >= (1 - 1e-12) * max(found.links)


def test_what_shares_a_link_waits_for_it():
    """The gathers alone are shorter than the work, and so are the exchanges; both together are not."""
    setting = Setting(layout=Layout(ep=16, dp=64), micro_batch=2, accumulation=2, num_chunks=4)
    fast, slow = (Estimator(job(dataclasses.replace(H100, inter=Link(rate=rate))))(setting) for rate in (400e9, 20e9))
    assert fast.seconds["exposed gathers"] == 0 < slow.seconds["exposed gathers"]
    assert slow.step >= slow.links.between > slow.links.inside


def test_context_parallel_across_nodes():
    """64 ranks of one sequence and its experts: more link than work, seen in every part of the step."""
    setting = Setting(layout=Layout(cp=8, ep=64, dp=8), micro_batch=1, accumulation=32, num_chunks=4)
    found = Estimator(job(ASCEND))(setting)
    assert found.step >= (1 - 1e-12) * max(found.links)


@pytest.mark.parametrize("policy, calls", [("none", 5120), ("full", 7680)])
def test_a_recompute_repeats_the_all_reduces_of_tensor_parallelism(policy, calls):
    """10 layers of a stage, 128 passes: 4 in a layer and pass, and 2 more in its recompute."""
    setting = Setting(layout=Layout(tp=8, dp=2, pp=4), backend=MEGATRON, accumulation=128, policy=policy)
    (reduced,) = [each for each in Megatron(job()).traffic(setting) if each.group == "tp"]
    assert reduced.calls == calls and reduced.nbytes == calls * 4096 * 2048 * 2


def test_ulysses_sends_what_the_host_sends():
    """CP=2, 2048 tokens on a rank, bf16, forward and backward; the output's gates stay where they are.

    Full attention, 10 layers: queries and output 4096 wide, keys and values 512. Linear, 30 layers: queries and keys
    2048, values and output 4096, b and a 32.
    """
    (_, calls, full), (_, linear_calls, linear) = ulysses_traffic(load_model("35b"), 2, 2048, 2)
    assert full == 2 * 10 * 2048 * (2 * 4096 + 2 * 512) * 2 and round(full / 1e9, 4) == 0.7550
    assert linear == 2 * 30 * 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) * 2 and round(linear / 1e9, 3) == 3.036
    assert (calls, linear_calls) == (8 * 10, 12 * 30)


@pytest.mark.parametrize("policy, times", [("none", 2), ("full", 3)])
def test_a_recompute_repeats_the_exchanges_of_context_parallelism(policy, times):
    estimator, setting = Estimator(job()), Setting(layout=Layout(cp=2, dp=32), accumulation=8, policy=policy)
    traffic = [each for each in estimator.traffic(setting) if each.group == "cp"]
    one = list(ulysses_traffic(load_model("35b"), 2, 2048, 2, directions=1))
    assert [each.nbytes for each in traffic] == [times * 8 * nbytes for _, _, nbytes in one]
    assert [each.calls for each in traffic] == [times * 8 * calls for _, calls, _ in one]


def test_the_fullest_stage_decides():
    """35.107e9 parameters on TP=8, PP=4, DP=2, 8 bytes on each rank and 8 shared by two: 13.17 GB on the mean stage.

    The first has the embedding and the vision tower in addition, of which the last has only as large a head.
    """
    state = Megatron(job())._state(Layout(tp=8, dp=2, pp=4))
    assert round(state.total / 1e9, 2) == 14.05
    mean = load_model("35b").num_parameters() / 32 * 12
    assert round(mean / 1e9, 2) == 13.17


@pytest.mark.parametrize("pp", [1, 2, 8, 40])
def test_the_stages_of_a_pipeline_add_up_to_the_model(pp):
    stages = Megatron(job())._stages(pp)
    assert len(stages) == pp and sum(map(sum, stages)) == load_model("35b").num_parameters()


def test_the_busiest_rank_of_a_group_that_nodes_do_not_share_evenly():
    """EP=8 on nodes of 6: two ranks of a group are alone on a node, and send 6 of 8 parts to the other one."""
    span = Layout(ep=8, dp=24).span("ep", 6)
    assert span == GroupShape(8, 6, 2) == GroupShape.counted((6, 2))
    assert collective_seconds(ALL_TO_ALL, 2**30, span, H100) == pytest.approx(16.11e-3, rel=1e-3)
    assert collective_seconds(ALL_TO_ALL, 2**30, GroupShape(8, 4), H100) == pytest.approx(10.74e-3, rel=1e-3)
    # two ranks receive what the other six have
    assert collective_seconds(ALL_GATHER, 50e9, span, H100) == pytest.approx(6 / 8 / 2)


def test_sums_of_links():
    assert LinkSeconds(1, 2).plus(LinkSeconds(3, 4), 2) == (7, 10)


def test_a_call_of_one_token_sends_something():
    """A row goes to one of 16 ranks, or to several: never to none."""
    for dispatch in ("per_expert", "per_rank"):
        shape = LayerShape(
            tokens=1, hidden=8, intermediate=8, experts=16, top_k=1 if dispatch == "per_expert" else 2, ep=16,
            element_size=2, dispatch=dispatch,
        )  # fmt: skip
        assert exchanges(shape, num_chunks=1).sent > 0
