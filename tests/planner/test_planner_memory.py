"""The ledger of an MoE layer against the tracker, one rank of two in this process: no wire, so nothing is late.

On real ranks gloo's threads let go of what they carried a moment after the wait, which the tracker sees as a higher
peak; see test_planner_measured.py. Here rows that arrive hold anything, and bytes are all that is looked at.
"""

import pytest
import torch
import torch.distributed as dist

import planner_ranks
from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig
from mindspeed_chunk.dist import DONE
from mindspeed_chunk.moe import agreement, dispatcher, plan
from mindspeed_chunk.planner import LayerShape, expert_memory
from mindspeed_chunk.tools.measure import LiveBytes

TOLERANCE = 0.01
SIZES = {"tiny": (512, 96, 56, 16, 3), "middle": (1024, 384, 192, 32, 4)}


@pytest.fixture
def one_of_two(monkeypatch):
    """A group of two ranks of which this is the first; the other one is taken to route like it."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr(plan, "all_gather", lambda local, group, name: (torch.stack([local.view(-1)] * 2), DONE))
    monkeypatch.setattr(agreement, "agree", lambda *args: None)
    monkeypatch.setattr(agreement, "check_all_to_all", lambda *args: None)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("dispatch", ["per_expert", "per_rank"])
@pytest.mark.parametrize(
    "size, dtype", [("tiny", torch.float32), ("tiny", torch.bfloat16), ("middle", torch.float32)], ids=str
)
def test_the_ledger_is_within_1_percent_of_the_tracker(size, dtype, dispatch, one_of_two):
    tokens, hidden, width, experts, top_k = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    index_TK = torch.multinomial(torch.ones(tokens, experts), top_k, generator=generator)

    def normal(*shape):
        return torch.randn(shape, generator=generator).mul_(0.1).to(dtype).requires_grad_()

    x_TH, weight_TK, grad_TH = normal(tokens, hidden), normal(tokens, top_k), normal(tokens, hidden).detach()
    weights = (normal(experts // 2, 2 * width, hidden), normal(experts // 2, hidden, width))
    shape = LayerShape(
        tokens=tokens, hidden=hidden, intermediate=width, experts=experts, top_k=top_k, ep=2,
        element_size=dtype.itemsize, dispatch=dispatch,
    )  # fmt: skip
    for keep in KEEPS:
        for schedule, lookahead in (
            *((schedule, 1) for schedule in SCHEDULES),
            *(("rolling", ahead) for ahead in (0, 3)),
        ):
            for n in planner_ranks.CHUNKS:
                config = ChunkMoEConfig(
                    moe_num_chunks=n,
                    chunk_moe_keep=keep,
                    chunk_moe_schedule=schedule,
                    chunk_moe_lookahead=lookahead,
                    chunk_moe_dispatch=dispatch,
                )
                layer = dispatcher.ChunkMoEDispatcher(config, weight_layout="LFH")
                with LiveBytes() as live:
                    out_TH = layer(experts, weight_TK, index_TK, x_TH, *weights, one_of_two)
                    kept, forward, live.peak = live.now - out_TH.nbytes, live.peak, live.now
                    torch.autograd.grad(out_TH, (x_TH, weight_TK, *weights), grad_TH)
                rows = planner_ranks.rows_of([index_TK, index_TK], n, 0, experts, dispatch)
                found = expert_memory(shape, num_chunks=n, schedule=schedule, keep=keep, lookahead=lookahead, rows=rows)
                assert found.kept == pytest.approx(kept, rel=TOLERANCE, abs=planner_ranks.A_FEW_COUNTS), (
                    keep,
                    schedule,
                    lookahead,
                    n,
                )
                assert found.forward_peak == pytest.approx(forward, rel=TOLERANCE), (keep, schedule, lookahead, n)
                backward = live.peak - found.weight_grads
                assert found.backward_peak == pytest.approx(backward, rel=TOLERANCE), (keep, schedule, lookahead, n)
