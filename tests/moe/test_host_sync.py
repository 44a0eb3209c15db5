"""One layer call waits for the device once, for its plan: forward, backward, every memory mode, recompute."""

import itertools

import pytest
import torch
import torch.distributed as dist

from cuda_on_cpu import cuda_ops
from host_sync import HostSync, no_host_sync
from launcher import run_ranks
from layer_cases import call_cases, watched
from mindspeed_chunk.device import HostCopy

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
