"""Whether anything keeps of a tensor's values, and what a recompute leaves out where nothing does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from launcher import run_ranks
from layer import Case, Layer
from mindspeed_chunk.config import KEEPS, ChunkMoEConfig
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher
from mindspeed_chunk.moe.readers import Readers
from mindspeed_chunk.moe.replay import replay_contexts
from mindspeed_chunk.observe import observe

X, OTHER = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
MASK = torch.tensor([[True], [False], [True]])
NORM = nn.LayerNorm(4)
NOT_READ = {
    "sum of two": lambda y: y + OTHER,
    "reshaped, residual": lambda y: OTHER + y.reshape(1, 3, 4).squeeze(0),
    "in place": lambda y: OTHER.clone().add_(y),
    "copied": lambda y: torch.empty(3, 4).copy_(y) - OTHER,
    "where": lambda y: torch.where(MASK, OTHER, y),
    "another dtype": lambda y: y.to(torch.float64).t().contiguous(),
    "joined and cut": lambda y: torch.cat([y, OTHER]).split(3)[0],
    "read beside it": lambda y: OTHER.sin() * OTHER + y,
}
READ = {
    "product": lambda y: y * OTHER,
    "norm": NORM,
    "after a view": lambda y: (OTHER + y.view(-1).view(3, 4)).sigmoid(),
    "in place": lambda y: OTHER.clone().mul_(y),
    "as a condition": lambda y: torch.where(y, OTHER, OTHER),
    "on the host": lambda y: OTHER * y.sum().item(),
    "on the side": lambda y: (y.tanh(), y + OTHER)[1],
    "matmul": lambda y: y @ OTHER.t(),
    "through another": lambda y: (y + OTHER).exp(),
    "out argument": lambda y: torch.mul(y.detach(), 2, out=torch.empty(3, 4)),
}


@pytest.mark.parametrize("name, after, expected", [
    *((name, after, set()) for name, after in NOT_READ.items()), *((name, after, {7}) for name, after in READ.items())
])  # fmt: skip
def test_who_reads(name, after, expected):
    y = X * 2
    y = y > 0 if name == "as a condition" else y
    with Readers() as readers:
        readers.follow(y, 7)
        after(y)
    assert readers.read == expected


def test_what_is_not_read_is_kept_by_no_node():
    """The list against autograd itself: among what these save there is nothing that depends on the value."""
    for name, after in NOT_READ.items():
        y, saved = X * 2, []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=saved: kept.append(t.clone()) or t, lambda t: t):
            after(y)
            first = saved[:]
            saved.clear()
            after(y.detach().mul(3).add(1).requires_grad_())
        assert len(first) <= len(saved)
        for kept in first:
            assert any(kept.shape == other.shape and torch.equal(kept, other) for other in saved), name


def test_two_tensors_are_told_apart():
    with Readers() as readers:
        first, second = X * 2, X * 3
        readers.follow(first, 0)
        readers.follow(second, 1)
        (first + OTHER).add_(1)
        second.exp()
    assert readers.read == {1}


BLOCKS = {
    "residual": (lambda x, y: x + y, False),
    "shared expert after it": (lambda x, y: x + (y + x.sigmoid() * x), False),
    "scaled": (lambda x, y: x * y, True),
    "normed": (lambda x, y: nn.functional.layer_norm(x + y, (10,)), True),
}


def count(rank, world_size):
    """All-to-alls of a step, and gradients with and without the checkpoint, for every block and mode."""
    told = {}
    for name, (after, _) in BLOCKS.items():
        for keep in KEEPS:
            for skip in (True, False):
                layer = Layer(Case(chunks=4, keep=keep, tokens=(12, 7)), rank, world_size)
                config = ChunkMoEConfig(moe_num_chunks=4, chunk_moe_keep=keep, chunk_moe_skip_unread=skip)
                told[name, keep, skip] = step_twice(layer, ChunkMoEDispatcher(config), after)
    return told


def step_twice(layer, dispatcher, after):
    leaves = layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )

    def block(x):
        return after(x, layer.call(dispatcher, {**leaves, "x": x.sin()}, dist.group.WORLD))

    inputs = list(leaves.values())
    plain = torch.autograd.grad(block(leaves["x"]), inputs, layer.grad)
    counts = []
    for _ in range(2):
        with observe() as events:
            out = checkpoint(block, leaves["x"], use_reentrant=False, context_fn=replay_contexts)
            again = torch.autograd.grad(out, inputs, layer.grad)
        assert all(map(torch.equal, again, plain))
        kinds = [event.kind for event in events]
        counts.append((kinds.count("all_to_all"), kinds.count("all_gather"), kinds.count("host_copy")))
    return counts


def test_a_recompute_leaves_out_what_nobody_reads():
    chunks = 4
    for told in run_ranks(count, 2):
        for (name, keep, skip), counts in told.items():
            read = BLOCKS[name][1]
            exchanges = 6 * chunks if read or not skip else (4 if keep == "input" else 5) * chunks
            assert counts == [(exchanges, 1, 1)] * 2, (name, keep, skip)


def other_path(rank, world_size):
    """A block that reads the output in its second pass only, and makes a second layer call in its third."""
    case = Case(chunks=2, tokens=(9, 6))
    layer = Layer(case, rank, world_size)
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=2, chunk_moe_skip_unread=True))
    leaves = layer.leaves(
        {"x": layer.x, "weight": layer.weight, "fc1": layer.local(layer.fc1_EHF), "fc2": layer.local(layer.fc2_EIH)}
    )

    def block(x, path):
        y = layer.call(dispatcher, {**leaves, "x": x}, dist.group.WORLD)
        if path == "read":
            return x + torch.relu(y)
        if path == "twice":
            y = y + layer.call(dispatcher, {**leaves, "x": y}, dist.group.WORLD)
        return x + y

    inputs = list(leaves.values())
    for path in ("added", "read", "twice", "added"):
        plain = torch.autograd.grad(block(leaves["x"], path), inputs, layer.grad)
        out = checkpoint(block, leaves["x"], path, use_reentrant=False, context_fn=replay_contexts)
        assert all(map(torch.equal, torch.autograd.grad(out, inputs, layer.grad), plain)), path


def test_every_pass_is_judged_by_itself():
    run_ranks(other_path, 2)


def test_what_a_subclass_wraps_counts_as_read():
    class Wrapper(torch.Tensor):
        pass

    y = X * 2
    with Readers() as readers:
        readers.follow(y, 7)
        OTHER.as_subclass(Wrapper) + 1
    assert readers.read == {7}
