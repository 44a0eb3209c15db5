"""One layer call waits for the device once, for its plan: forward, backward, every memory mode, recompute."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from cuda_on_cpu import cuda_ops
from host_sync import HostSync, no_host_sync
from launcher import run_ranks
from layer import Case, Layer
from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig
from mindspeed_chunk.device import HostCopy
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.replay import replay_contexts
from mindspeed_chunk.observe import observe

ASKING = {
    "item": lambda x, mask: x[0].item(),
    "tolist": lambda x, mask: x.tolist(),
    "numpy": lambda x, mask: x.numpy(),
    "cpu": lambda x, mask: x.cpu(),
    "to": lambda x, mask: x.to("cpu"),
    "bool": lambda x, mask: bool(mask.any()),
    "if": lambda x, mask: 1 if mask.all() else 0,
    "int": lambda x, mask: int(x[1]),
    "float": lambda x, mask: float(x[1]),
    "index": lambda x, mask: [1, 2, 3, 4][x[1]],
    "in": lambda x, mask: 3 in x,
    "print": lambda x, mask: str(x),
    "nonzero": lambda x, mask: mask.nonzero(),
    "where": lambda x, mask: torch.where(mask),
    "mask": lambda x, mask: x[mask],
    "set by mask": lambda x, mask: x.__setitem__(mask, x),
    "masked_select": lambda x, mask: x.masked_select(mask),
    "list": lambda x, mask: x[[0, 2]],
    "tensor": lambda x, mask: torch.tensor([1, 2], device="cpu"),
    "new_tensor": lambda x, mask: x.new_tensor([1]),
    "host tensor": lambda x, mask: x + torch.ones(4),
    "copied host tensor": lambda x, mask: x.copy_(torch.tensor([1, 2, 3, 4])),
    "bincount": lambda x, mask: torch.bincount(x, minlength=9),
    "unique": lambda x, mask: x.unique(),
    "repeat_interleave": lambda x, mask: torch.repeat_interleave(x, x),
    "equal": lambda x, mask: torch.equal(x, x),
}


@pytest.mark.parametrize("what", ASKING)
def test_every_kind_is_seen(what):
    x, mask = torch.arange(4), torch.tensor([True, False, True, False])
    with no_host_sync(), pytest.raises(HostSync):
        ASKING[what](x, mask)


def test_what_waits_for_nothing_is_let_through():
    x, mask = torch.arange(4), torch.tensor([True, False, True, False])
    with no_host_sync():
        x.masked_fill(mask, 1)[x.sort().indices][1:].cumsum(0)
        torch.repeat_interleave(x, x, output_size=6) + torch.arange(6, device=x.device)
        x[:2] = 5
        told = HostCopy(x, "test").wait()
        assert told[:2].sum().item() == 10 and (told + torch.ones(4)).tolist() == [6, 6, 3, 4]
        with pytest.raises(HostSync):
            x + told


FITS = {"hidden": 24, "intermediate": 8, "experts": 6, "top_k": 3}  # widths that a grouped matmul takes


def call_cases():
    for keep, schedule, dtype in itertools.product(KEEPS, SCHEDULES, (torch.float32, torch.float64)):
        yield Case(chunks=3, keep=keep, schedule=schedule, dtype=dtype, **FITS)
    for change in (
        {"padded": True},
        {"limit": 0.5},
        {"tokens": (0, 5)},
        {"layout": "LFH"},
        {"dense_weights": True},
        {"router_dtype": torch.float32, "dtype": torch.bfloat16},
        {"frozen": ("x", "weight")},
        {"activation": "module"},
        {"chunk_size": 4, "chunks": 0},
    ):
        yield Case(**{"chunks": 3, "dtype": torch.float32, **FITS, **change})


def watched(case, *, checkpointed, rank=0, ranks=1, group=None):
    """Forward and backward of a call that is not the first; returns how often the host waited for a copy."""
    layer = Layer(case, rank, ranks)
    leaves = layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )
    config = ChunkMoEConfig(**{**vars(case.config()), "chunk_moe_skip_unread": checkpointed})
    dispatcher = ChunkMoEDispatcher(config, weight_layout=case.layout)

    def block(x):
        return layer.call(dispatcher, {**leaves, "x": x}, group) * 1

    block(leaves["x"])  # agrees with the other ranks, and tries the activation
    with no_host_sync(), observe() as events:
        if checkpointed:
            out = checkpoint(
                block, leaves["x"], use_reentrant=False, preserve_rng_state=False, context_fn=replay_contexts
            )
        else:
            out = block(leaves["x"])
        out.backward(layer.grad)
    return sum(event.kind == "host_copy" for event in events)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_layer_call_waits_once(checkpointed):
    with cuda_ops():
        for case in call_cases():
            assert watched(case, checkpointed=checkpointed) == 1


def watched_on_ranks(rank, world_size):
    with cuda_ops():
        for case, checkpointed in itertools.product(call_cases(), (False, True)):
            copies = watched(case, checkpointed=checkpointed, rank=rank, ranks=world_size, group=dist.group.WORLD)
            assert copies == (2 if case.chunk_size else 1)  # with a chunk size, the ranks agree on a number first


def test_a_layer_call_waits_once_on_ranks():
    run_ranks(watched_on_ranks, 2)


def test_the_watcher_sees_what_the_cpu_back_end_asks():
    with pytest.raises(HostSync, match="bincount"):
        watched(next(call_cases()), checkpointed=False)
