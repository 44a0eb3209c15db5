"""Blocks whose saved tensors are offloaded, a pool that counts, and copies that are late."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_chunk.mbs.offload import ActivationOffload, HostPool
from mindspeed_chunk.observe import emit

ROWS, H = 24, 20  # a hidden state of 3840 bytes: large enough to leave


class Mark(torch.autograd.Function):
    """Tells when a block's forward has begun, and its backward."""

    @staticmethod
    def forward(ctx, x, name, direction):
        ctx.name, ctx.direction = name, direction
        if direction == "forward":
            emit("mark", f"forward {name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.direction == "backward":
            emit("mark", f"backward {ctx.name}")
        return grad, None, None


class Table(nn.Module):
    """Is called without arguments, as a block of nothing but parameters may be."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(ROWS, H))

    def forward(self):
        return self.weight.sin().square()


class Block(nn.Module):
    """Saves inputs (one of them for three ops), outputs (sigmoid, softmax), views, ints; `depth` says how many."""

    def __init__(self, name="block", depth=1):
        super().__init__()
        torch.manual_seed(depth + len(name))
        self.name, self.depth = name, depth
        self.norm = nn.LayerNorm(H)
        self.q, self.k, self.v = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)
        self.inner = nn.Linear(H, 33)
        self.outer = nn.Linear(33, H)
        self.double()
        self.run_inner = self.mlp

    def mlp(self, x):
        return self.outer(self.inner(x).sigmoid() * 2)

    def forward(self, x, extra=None):
        x = Mark.apply(x, self.name, "forward")
        for _ in range(self.depth):
            h = self.norm(x)
            scores = (self.q(h) @ self.k(h).transpose(-1, -2)).softmax(-1)
            x = x + scores @ self.v(h)
            if extra is not None:
                x = x * extra
            x = x + self.run_inner(x).gather(-1, x.argsort(-1))
        return Mark.apply(x, self.name, "backward")


def blocks(offload=None, count=4, recompute="", depths=(1, 3, 2)):
    """Blocks that save unequally; recompute: "block" inside of the offload, "part" of it, or "" for none."""
    made = nn.ModuleList([Block("abcdefgh"[i], depths[i % len(depths)]) for i in range(count)])
    for block in made:
        if recompute == "block":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        elif recompute == "part":
            block.run_inner = partial(checkpoint, block.mlp, use_reentrant=False)
        if offload is not None:
            block.forward = offload.wrap(block.name, block)
    return made


class CountingPool(HostPool):
    """Knows how many buffers there are, and how many are out."""

    def __init__(self):
        super().__init__()
        self.buffers, self.out = set(), 0
        self.early = False  # whether one came back while a copy was under way

    def take(self, nbytes, device):
        buffer = super().take(nbytes, device)
        self.out += 1
        self.buffers.add(buffer.untyped_storage().data_ptr())
        return buffer

    def give(self, buffer):
        self.out -= 1
        pointer = buffer.untyped_storage().data_ptr()
        self.early |= any(pointer in (t.untyped_storage().data_ptr() for t in pair) for pair in LateLane.under_way)
        super().give(buffer)


class LateLane:
    """Copies that are done at `wait()` and not before: until then the target holds NaN, and the source must stay."""

    device = torch.device("cpu")
    under_way = []

    def copy(self, target, source):
        fill = float("nan") if target.is_floating_point() else 0
        target.data.fill_(fill)  # `data`: a copy on a side stream is no change that autograd sees
        return _Late(target, source)


class _Late:
    def __init__(self, target, source):
        self.pair = target, source
        LateLane.under_way.append(self.pair)

    def wait(self):
        if self.pair is not None:
            target, source = self.pair
            target.data.copy_(source)
            LateLane.under_way[:] = [pair for pair in LateLane.under_way if pair is not self.pair]
            self.pair = None


def make(late=False):
    offload = ActivationOffload()
    offload.pool = CountingPool()
    if late:
        offload._lane = LateLane()
    return offload


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def run(modules, x, *args, passes=1):
    x = x.detach().requires_grad_()
    modules.zero_grad()
    hidden = x * 1
    for module in modules:
        hidden = module(hidden, *args)
    for repeat in range(passes):
        hidden.square().sum().backward(retain_graph=repeat + 1 < passes)
    return [hidden.detach(), x.grad, *(p.grad for p in modules.parameters())]


def equal(mine, theirs):
    assert len(mine) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs))
