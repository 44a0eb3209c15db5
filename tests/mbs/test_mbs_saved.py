"""Memory of micro-chunks and offload: what leaves, what a changed tensor is, and that nothing is kept."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alive import STEPS, growth
from mindspeed_chunk.config import ChunkMBSConfig
from mindspeed_chunk.mbs import offload as offload_module
from mindspeed_chunk.mbs.block import ChunkMBS
from offloaded import ROWS, Block, H, LateLane, blocks, make, rand, run


class Live(TorchDispatchMode):
    """Bytes of the tensors made while it is active, most at one time."""

    def __init__(self):
        super().__init__()
        self.peak, self._made = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is not None and storage._cdata not in before:
                self._made[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self):
        return sum(nbytes for storage, nbytes in self._made.values() if storage() is not None)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_memory_of_cutting_and_joining(batch_dim):
    """Of a block that only doubles, B micro-chunks: whole is the size of the hidden states."""
    x = rand(8, 7, H) if batch_dim == 0 else rand(7, 8, H)
    whole, part = x.nbytes, x.nbytes // 8
    x, grad = x.requires_grad_(), torch.ones_like(x)
    forward = ChunkMBS(ChunkMBSConfig(chunk_mbs=1, batch_dim=batch_dim)).wrap(
        "block", lambda x: x * 2, lambda hidden_states: None
    )
    with Live() as live:
        out = forward(x)
    assert live.now() == whole and live.peak == whole + 2 * part  # the output; a micro-chunk's input and output
    with Live() as live:
        (x_grad,) = torch.autograd.grad(out, x, grad)
    assert live.now() == whole and live.peak == whole + part
    assert torch.equal(x_grad, torch.full_like(x, 2))


def test_memory_of_a_group_is_free_once_it_is_sent():
    offload = make(late=True)
    modules, alive = blocks(offload, count=3, depths=(1,)), []
    pack = offload_module._SavedByCall.pack

    def counted(group, tensor):
        packed = pack(group, tensor)
        if isinstance(packed, offload_module._SavedTensor):
            alive.append((group.name, weakref.ref(tensor.untyped_storage())))
        return packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload_module._SavedByCall, "pack", counted)
        hidden = rand(ROWS, H).requires_grad_()
        for module in modules:
            hidden = module(hidden * 1)
    left = [name for name, storage in alive if storage() is not None]
    assert set(left) == {"c"} and {name for name, _ in alive} == set("abc")
    hidden.sum().backward()
    assert not any(storage() is not None for _, storage in alive)


@pytest.mark.parametrize("wrapped", [1, 3])
def test_a_graph_that_is_dropped_gives_everything_back(wrapped):
    """Outputs that their own op saved (sigmoid, softmax) would hold their graph, and that them."""
    gc.disable()
    try:
        offload = make(late=True)
        hidden = rand(ROWS, H).requires_grad_()
        alive = []
        for module in blocks(offload, count=wrapped):
            module.inner.register_forward_hook(lambda module, args, out: alive.append(weakref.ref(out)))
            module.outer.register_forward_hook(
                lambda module, args, out: alive.append(weakref.ref(args[0].untyped_storage()))
            )
            hidden = module(hidden)
        node = weakref.ref(hidden.grad_fn)
        del hidden, module
        assert node() is None and not any(reference() is not None for reference in alive)
        assert offload.pool.out == 0
    finally:
        gc.enable()


def test_a_graph_that_is_dropped_while_its_copies_are_under_way():
    offload, held = make(late=True), []
    held.append(offload.wrap("first", Block())(rand(ROWS, H).requires_grad_()))
    taken = []

    def dropping(module, x):
        taken.append(offload.pool.out)
        held.clear()
        taken.append(offload.pool.out)
        return x.exp()

    offload.wrap("other", Op(dropping))(rand(ROWS, H).requires_grad_())
    assert taken[0] > 0 and taken[1] == 0
    assert not offload.pool.early and not LateLane.under_way


@pytest.mark.parametrize("shape", [(ROWS, H), (3, 2)])
def test_small_outputs_do_not_hold_their_graph(shape):
    class Gate(nn.Module):
        def forward(self, x):
            return x.sigmoid()

    gc.disable()
    try:
        gate = Gate()
        out = make().wrap("gate", gate)(rand(*shape).requires_grad_())
        storage = weakref.ref(out.untyped_storage())
        del out
        assert storage() is None
    finally:
        gc.enable()


def test_buffers_are_used_again_and_memory_is_flat():
    offload = make()
    modules, counts, x = blocks(offload), [], rand(200, H)

    def step():
        run(modules, x)
        assert offload.pool.out == 0
        counts.append(len(offload.pool.buffers))

    assert growth(step) == 0
    assert counts == [counts[0]] * STEPS


def test_other_lengths_use_the_same_buffers():
    offload = make()
    modules = blocks(offload, count=3, depths=(1,))
    for rows in (*range(100, 140), *range(140, 100, -1)):
        run(modules, rand(rows, H))
    first = make()
    run(blocks(first, count=3, depths=(1,)), rand(100, H))
    assert len(offload.pool.buffers) <= 3 * len(first.pool.buffers)  # of 40 lengths; scores grow with their square
    nbytes = {buffer.numel() for buffers in offload.pool._free.values() for buffer in buffers}
    assert all(size & (size - 1) == 0 for size in nbytes)  # as much as torch's allocator of pinned memory takes


class Op(nn.Module):
    """`function(weight, *arguments)`."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(rand(ROWS, H))
        self.register_buffer("table", rand(ROWS, H))

    def forward(self, *args):
        return self.function(self, *args)


def sent(function, *args, before=lambda offload: None):
    """Shapes that leave for the host from a call of `function`, whose gradients are checked to be right."""
    offload = make()
    before(offload)
    args = [arg.requires_grad_(arg.is_floating_point()) for arg in args]
    first, other = Op(function), Block("other")
    plain = torch.autograd.grad(function(first, *args).square().sum(), [first.weight, *args], allow_unused=True)
    found, saved = offload.wrap("first", first), []
    with pytest.MonkeyPatch.context() as patch:
        send = offload_module._SavedTensor.send
        patch.setattr(
            offload_module._SavedTensor, "send", lambda self: saved.append(list(self._like.shape)) or send(self)
        )
        out = found(*args)
        offload.wrap("other", other)(rand(ROWS, H).requires_grad_())
    again = torch.autograd.grad(out.square().sum(), [first.weight, *args], allow_unused=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again) if a is not None)
    return saved


class Sharded:
    """As much of a DTensor as is asked for."""

    def __init__(self, local):
        self.to_local = lambda: local


def test_what_never_leaves():
    x, mask = rand(ROWS, H), rand(ROWS, H)
    # the weight, views of it, buffers; the hidden states leave
    assert sent(lambda m, x: x * m.weight, x.clone()) == [[ROWS, H]]
    assert sent(lambda m, x: x[:, :0].sum() + m.weight.t() @ m.weight.exp().log(), x.clone()) == [[ROWS, H]] * 2
    assert sent(lambda m, x: m.weight * m.table + x[:1], x.clone()) == []
    # arguments besides the hidden states, and hidden states that are a part of something larger
    assert sent(lambda m, x, mask: x * 2 * mask, x.clone(), mask) == [[ROWS, H]]  # x * 2
    assert sent(lambda m, x, mask: m.weight * mask, x.clone(), mask) == []
    assert sent(lambda m, x: x * m.weight, rand(2, ROWS, H)[0]) == []
    # less than a kibibyte; another device
    assert sent(lambda m, x: x[:6].exp() * 2, x.clone()) == []
    assert sent(lambda m, x: x.exp() * 2, x.clone(), before=lambda o: setattr(o, "_lane", OtherDevice())) == []

    def gathered(module, x):
        module.parameters = lambda: [Sharded(module.weight)]
        return x * module.weight

    assert sent(gathered, x.clone()) == [[ROWS, H]]


class OtherDevice(LateLane):
    device = torch.device("meta")


def test_layouts_that_a_copy_must_keep_or_may_change():
    x = rand(ROWS, H)
    for function in (
        lambda m, x: (x.t() * 2).exp().sin().t(),
        lambda m, x: (x * 2)[:, ::2].sin(),
        lambda m, x: (x[:, :1] * 2).expand(-1, 90).sin(),
        lambda m, x: torch.view_as_real(torch.complex(x, x * 3).conj() ** 2),
        lambda m, x: (x * 2).to(torch.bfloat16).sin().double() + x.float().sin(),
        lambda m, x: torch.where((x.repeat(3, 1) > 0.3), x.repeat(3, 1), 0),
        lambda m, x: x.view(1, ROWS, H, 1).expand(2, -1, -1, 3).to(memory_format=torch.channels_last).sin(),
    ):
        assert sent(function, x.clone())


CHANGES = {
    "large": lambda m, x, mask: _changed(x * 2),
    "small": lambda m, x, mask: _changed(x[:1] * 2),
    "an argument": lambda m, x, mask: _changed(mask, x),
    "a weight": lambda m, x, mask: _changed(m.weight.detach(), x),
    "twice": lambda m, x, mask: _changed(x.exp(), again=True),
}


def _changed(value, by=None, again=False):
    out = value.sin() if by is None else value * by
    value.add_(1)
    return out + value.sin() if again else out


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("when", ["backward", "next block"])
def test_a_tensor_changed_in_place_is_an_error_and_no_wrong_number(case, when):
    offload, x, mask = make(), rand(ROWS, H).requires_grad_(), rand(ROWS, H)
    message = r"saved for the backward of first, was changed in place"
    with pytest.raises(RuntimeError, match=message):
        out = offload.wrap("first", Op(CHANGES[case]))(x, mask)
        if when == "next block":
            offload.wrap("other", Block())(rand(ROWS, H).requires_grad_())
        out.sum().backward()
    out = None
    assert offload.pool.out == 0


def test_changed_while_its_copy_is_under_way():
    offload, held = make(late=True), []

    def function(module, x):
        held.append(x * 2)
        return held[0].sin()

    out = offload.wrap("first", Op(function))(rand(ROWS, H).requires_grad_())
    changing = Op(lambda module, x: held[0].add_(1) * x)
    with pytest.raises(RuntimeError, match="was changed in place"):
        offload.wrap("other", changing)(rand(ROWS, H).requires_grad_())
    del out


def test_a_tensor_changed_between_two_ops_that_save_it_is_two_tensors():
    """The first op's result is not used any more, so autograd has nothing against the change."""

    class Changing(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            y * y  # saves y as it is now, and is dropped
            y.add_(1)
            return y * y

    x = torch.randn(ROWS, H, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(Changing()(x).sum(), x)
    module = Changing()
    module.forward = offload_module.ActivationOffload().wrap("changing", module)
    (got,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(got, expected)
