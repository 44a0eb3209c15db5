"""What a layer call costs an NPU: nothing on the AI CPU or element by element, one wait, and the counts in costs.json.

The counts are exact, so that a change is noticed. After a change that you want, run this file with WRITE_COSTS=1, then
`python docs/make`, which makes the table of docs/ascend.md from them.
"""

import bisect
import dataclasses
import itertools
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ascend import rig
from ascend.costs import BY_OP, KERNELS, SOURCES, Costs
from host_sync import HostSync, no_host_sync
from launcher import run_ranks
from layer import Case, Layer, recomputed
from mindspeed_chunk.config import KEEPS, ChunkMoEConfig
from mindspeed_chunk.moe.costs import timing
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.schedule import build
from mindspeed_chunk.observe import observe

TABLE = Path(__file__).with_name("costs.json")
MOST_SCATTERED = 1024  # elements
# a chunk of eight has more rows than may be scattered, and gloo needs no pieces for the rows of one chunk
TOKENS, TOP_K, EXPERTS, HIDDEN = 4096, 4, 8, 32
NO_ROWS = 1  # the expert without rows


@dataclasses.dataclass(frozen=True)
class Call:
    """One layer call of two ranks.

    Attributes:
        dispatch: `chunk_moe_dispatch`, "per_expert" or "per_rank".
        routing: "balanced", or "skewed": one expert is popular, and another one gets no row.
        recompute: under a checkpoint, whose output something reads.
    """

    chunks: int = 4
    routing: str = "balanced"
    keep: str = "activations"
    padded: bool = False
    recompute: bool = False
    dispatch: str = "per_expert"


CALLS = (
    *itertools.starmap(Call, itertools.product((1, 2, 4, 8), ("balanced", "skewed"))),
    *(Call(keep=keep) for keep in KEEPS[1:]),
    *(Call(keep=keep, recompute=True) for keep in KEEPS),
    *(Call(routing="skewed", keep=keep, padded=True, recompute=True) for keep in KEEPS),
)
CALLS += tuple(dataclasses.replace(call, dispatch="per_rank") for call in CALLS)


def layer_of(call, rank, world_size):
    case = Case(
        chunks=call.chunks, keep=call.keep, padded=call.padded, routing="balanced", tokens=(TOKENS,), hidden=HIDDEN,
        intermediate=HIDDEN // 4, experts=EXPERTS, top_k=TOP_K, dtype=torch.bfloat16,
    )  # fmt: skip
    layer = Layer(case, rank, world_size)
    if call.routing == "skewed":
        scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(rank))
        scores[:, 0] += 0.5
        scores[:, NO_ROWS] = -1
        layer.index = scores.topk(TOP_K).indices
    return layer


def measured(call, rank, world_size):
    """The counts of the second call: the first one also agrees with the other rank."""
    layer, group = layer_of(call, rank, world_size), dist.group.WORLD
    weights = {"fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, **weights})
    config = ChunkMoEConfig(moe_num_chunks=call.chunks, chunk_moe_keep=call.keep, chunk_moe_dispatch=call.dispatch)
    dispatcher = ChunkMoEDispatcher(config)

    def block(x):
        out = layer.call(dispatcher, {**leaves, "x": x}, group)
        return out * out if call.recompute else out

    block(leaves["x"])
    with no_host_sync() as host, observe() as events, Costs(TOKENS * TOP_K, HIDDEN, host) as costs:
        options = {"preserve_rng_state": False} if call.recompute else {}
        out = recomputed(block, leaves["x"], **options) if call.recompute else block(leaves["x"])
        torch.autograd.grad(out, list(leaves.values()), layer.grad)
    return {
        **dataclasses.asdict(call),
        "device_ops": costs.ops.total(),
        "by_action": [] if call.recompute else by_action(call, events, costs),
        "on_ai_cpu": dict(costs.on_ai_cpu),
        "not_in_the_wheel": sorted(costs.not_in_the_wheel),
        "scattered": sum(n for n in costs.scattered if n > MOST_SCATTERED),
        "strided_reads": costs.strided_reads,
        "passes": costs.passes,
        "host_waits": sum(event.kind == "host_copy" for event in events),
    }


def by_action(call, events, costs):
    """Device ops of the actions of each kind, in the forward and in the backward.

    An action has the ops since the one before: P0 also has those before the walk, and what comes after U is left out.
    """
    actions = [event for event in events if event.kind == "action"]
    forward, before, counts = len(build("rolling", call.chunks)), 0.0, [Counter(), Counter()]
    for place, event in enumerate(actions):
        ops = bisect.bisect(costs.times, event.time) - bisect.bisect(costs.times, before)
        counts[place >= forward][event.name[0]] += ops
        before = event.time
    return [dict(sorted(each.items())) for each in counts]


def measure(rank, world_size, folder):
    with rig.back_end(rig.install(folder)):
        return [measured(call, rank, world_size) for call in CALLS]


@pytest.fixture(scope="module")
def table(wheel_folder):
    return run_ranks(measure, 2, wheel_folder)[0]


def test_nothing_runs_on_the_ai_cpu(table):
    assert all(not costs["on_ai_cpu"] for costs in table), table


def test_torch_npu_has_a_kernel_for_every_operation(table):
    assert all(not costs["not_in_the_wheel"] for costs in table), table


def test_nothing_is_scattered_one_element_after_the_other(table):
    assert all(costs["scattered"] == 0 for costs in table), table


def test_rows_with_strides_are_copied_once(table):
    assert all(costs["strided_reads"] == 1 for costs in table), table


def test_the_host_waits_once_in_a_forward_and_never_in_a_recompute(table):
    assert all(costs["host_waits"] == 1 for costs in table), table


def test_the_counts_are_those_of_the_table(table):
    if os.environ.get("WRITE_COSTS"):
        TABLE.write_text("[\n" + ",\n".join(f" {json.dumps(costs)}" for costs in table) + "\n]\n")
    assert json.loads(TABLE.read_text()) == table, "WRITE_COSTS=1 writes them; see the top of this file"


def test_the_planner_knows_how_often_the_host_launches(table):
    for costs in table:
        if costs["routing"] == "balanced" and costs["keep"] == "activations" and not costs["recompute"]:
            for known, counted in zip(timing.LAUNCHES[costs["dispatch"]], costs["by_action"], strict=True):
                assert counted == {kind: once + costs["chunks"] * each for kind, (once, each) in known.items()}, costs


def test_routing_changes_nothing_that_the_host_does(table):
    """Row counts differ from step to step; the operations may not."""
    for balanced, skewed in zip(table[0:8:2], table[1:8:2], strict=True):
        assert balanced["device_ops"] == skewed["device_ops"]


# What is wrong with a function of int64 [8] and bf16 rows [8, 8], and what is counted.
WRONG = {
    "cumsum": (lambda x, rows: x.cumsum(0), "on_ai_cpu", {"cumsum of int64": 1}),
    "sort": (lambda x, rows: x.argsort(), "on_ai_cpu", {"sort of int64": 1}),
    "sort of one": (lambda x, rows: x[:, None].float().sort(1), "on_ai_cpu", {"sort of float32": 1}),
    "fill": (lambda x, rows: x.masked_fill(x > 3, 0), "on_ai_cpu", {"masked_fill of int64": 1}),
    "division": (lambda x, rows: x // 2, "on_ai_cpu", {"floor_divide of int64": 1}),
    "search": (lambda x, rows: torch.searchsorted(x, x), "on_ai_cpu", {"searchsorted of int64": 1}),
    "scatter": (lambda x, rows: x.int().scatter_(0, x, x.int()), "scattered", [8]),
    "index": (lambda x, rows: x.int().scatter_add(0, x, x.int()), "scattered", [8]),
    "strides": (lambda x, rows: (rows[:, :4].contiguous(), rows[:, :4] + 1), "strided_reads", 2),
    "passes": (lambda x, rows: (rows.clone(), rows[:, :4] * 2), "passes", 4.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_rule_sees_what_it_forbids(name):
    function, attribute, expected = WRONG[name]
    x, rows = torch.arange(8), torch.ones(8, 8, dtype=torch.bfloat16)
    with no_host_sync() as host, Costs(8, 4, host) as costs:
        function(x, rows)
    assert getattr(costs, attribute) == expected


def test_an_operation_that_is_not_in_the_table_is_an_error():
    with no_host_sync() as host, Costs(8, 4, host), pytest.raises(AssertionError, match="erfinv of .*: not in KERNELS"):
        torch.ones(8, device="cpu").erfinv()


def test_an_operation_that_torch_npu_lacks_is_seen():
    with no_host_sync() as host, Costs(8, 4, host) as costs:
        torch.ones(8, device="cpu") + 1  # this process has no wheel
    assert costs.not_in_the_wheel == {"aten::add.Tensor"}


def test_a_histogram_without_a_range_waits():
    with no_host_sync(), pytest.raises(HostSync):
        torch.ones(8, device="cpu").histc(4)


def test_every_kernel_has_a_source():
    assert all(kernel.source.split("/")[0] in SOURCES for kernel in KERNELS)
    assert len(BY_OP) == sum(len(kernel.ops) for kernel in KERNELS)
