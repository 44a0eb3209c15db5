"""A block on micro-chunks against the block on the batch: outputs, gradients, what hooks record, agreement, order."""

import contextlib
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from launcher import run_ranks
from mindspeed_chunk.config import ChunkMBSConfig
from mindspeed_chunk.mbs.arguments import CannotCut
from mindspeed_chunk.mbs.block import ChunkMBS, transformers_outputs, wrap_blocks
from mindspeed_chunk.mbs.offload import ActivationOffload
from mindspeed_chunk.observe import observe

S, H, E = 7, 6, 4
AROUND = (lambda forward: forward), (lambda forward: partial(checkpoint, forward, use_reentrant=False))
TINY = Path(__file__).parents[2] / "examples" / "qwen3_5_35b" / "tiny"


class Block(nn.Module):
    """Attention with a mask and rotated queries, a router, an MLP; returns the hidden states and a statistic."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.router = nn.Linear(H, E)
        self.fc1, self.fc2 = nn.Linear(H, 5), nn.Linear(5, H)
        self.double()

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, tuple_out=False):
        q, k, v = self.qkv(self.norm(hidden_states)).chunk(3, -1)
        if position_embeddings is not None:
            cos, sin = position_embeddings
            q = q * cos + q.flip(-1) * sin
        scores = q @ k.transpose(1, 2)
        if attention_mask is not None:
            scores = scores + attention_mask
        hidden = hidden_states + self.out(scores.softmax(-1) @ v)
        gate = self.router(hidden.flatten(0, 1)).sigmoid().amax(-1).view(hidden.shape[:2]).unsqueeze(-1)
        hidden = hidden + gate * self.fc2(self.fc1(hidden).tanh())
        return (hidden, hidden.square().mean(-1), None) if tuple_out else hidden


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def micro(module, name="block", size=2, around=lambda forward: forward, **options):
    """The module with its forward on micro-chunks; `around` wraps what runs on each."""
    module.forward = ChunkMBS(ChunkMBSConfig(chunk_mbs=size), **options).wrap(
        name, around(module.forward), type(module).forward.__get__(module)
    )
    return module


def results(module, x, kwargs, loss, passes=1):
    """Outputs, and gradients of the input, of the arguments and of every parameter."""
    leaves = [leaf for leaf in tree_leaves(((x,), kwargs)) if isinstance(leaf, torch.Tensor)]
    for leaf in (*leaves, *module.parameters()):
        leaf.grad = None
    out = module(x * 1 if x.requires_grad else x, **kwargs)
    for repeat in range(passes):
        loss(out).backward(retain_graph=repeat + 1 < passes)
    return out, [leaf.grad for leaf in leaves], {n: p.grad for n, p in module.named_parameters()}


def same(mine, theirs, tolerance=1e-12):
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def weigh(out):
    """A loss that sees every element; a fixed weight each, so that no order of samples is like another."""
    return sum(
        (part * torch.linspace(-1, 1, part.numel(), dtype=part.dtype).view_as(part)).sum()
        for part in tree_leaves(out)
        if isinstance(part, torch.Tensor)
    )


def arguments(batch, grad=False):
    embeddings = (rand(batch, S, H).requires_grad_(grad), rand(1, S, H).requires_grad_(grad))
    return {"position_embeddings": embeddings, "attention_mask": rand(batch, S, S)}


CALLS = {
    "short last batch": (5, {}, weigh),
    "one sample": (1, {}, weigh),
    "no sample": (0, {}, weigh),
    "several arguments": (5, arguments(5), weigh),
    "arguments with gradients": (4, arguments(4, grad=True), weigh),
    "tuple": (5, {"tuple_out": True}, weigh),
    "a part of the output is not used": (5, {"tuple_out": True}, lambda out: weigh(out[1])),
    "expanded gradient": (5, {}, torch.sum),
    "transposed gradient": (5, {}, lambda out: weigh(out.transpose(0, 2).contiguous())),
    "every second sample": (5, {}, lambda out: weigh(out[::2])),
    "one micro-chunk has no gradient": (5, {}, lambda out: weigh(out[:2])),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_outputs_and_gradients_are_those_of_the_batch(call, needs_grad):
    batch, kwargs, loss = CALLS[call]
    x = rand(batch, S, H).requires_grad_(needs_grad)
    expected = results(Block(), x, kwargs, loss)
    for size in (2, 3):
        for passes in (1, 2):
            out, inputs, parameters = results(micro(Block(), size=size), x, kwargs, loss, passes)
            same(out, expected[0])
            same(inputs, [None if grad is None else passes * grad for grad in expected[1]])
            same(parameters, {name: None if g is None else passes * g for name, g in expected[2].items()})


def test_frozen_parameters_get_no_gradient_and_frozen_blocks_pass_it_on():
    x = rand(5, S, H)
    for frozen, needs_grad in ((("qkv", "norm"), True), (("qkv", "norm"), False), (("",), True), (("",), False)):
        blocks = [Block(), micro(Block())]
        for block in blocks:
            for name, parameter in block.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen))
        x.requires_grad_(needs_grad)
        if frozen == ("",) and not needs_grad:
            assert not blocks[1](x).requires_grad
            continue
        expected, mine = (results(block, x, {}, weigh) for block in blocks)
        same(mine, expected)


def test_a_gradient_of_gradients_and_a_gradient_of_one_parameter():
    x = rand(5, S, H).requires_grad_()
    found = []
    for block in (Block(), micro(Block())):
        out = block(x)
        (of_x,) = torch.autograd.grad(weigh(out), x, create_graph=True)
        second = torch.autograd.grad(of_x.square().sum(), [x, block.fc1.weight])
        found.append((of_x.detach(), *second, *torch.autograd.grad(weigh(block(x)), block.norm.weight)))
    same(found[1], found[0])


def test_a_micro_chunk_whose_output_does_not_depend_on_its_input():
    x = rand(5, S, H).requires_grad_()
    with torch.no_grad():
        x[2:4, 0, 0] = -99
    forward = ChunkMBS(ChunkMBSConfig(chunk_mbs=2)).wrap(
        "block", lambda x: x * 2 if x[0, 0, 0] > -9 else x.detach() * 2, Block.forward
    )
    out = forward(x)
    out.sum().backward()
    expected = torch.full_like(x, 2)
    expected[2:4] = 0
    assert torch.equal(out, x * 2) and torch.equal(x.grad, expected)


def test_modes_without_gradients():
    x = rand(5, S, H)
    expected, block = Block()(x), micro(Block())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = block(x)
        same(out, expected.detach())
        assert not out.requires_grad


def test_one_micro_chunk_is_the_modules_own_call():
    seen = []
    block = micro(Block(), size=5, around=lambda forward: lambda x: seen.append(x) or forward(x))
    x = rand(5, S, H)
    with observe() as events:
        block(x)
    assert seen[0] is x and not events


class Recorder:
    """Lists that forward hooks append to while `recording`, as transformers' capture does."""

    def __init__(self):
        self.lists = None

    def listen(self, module, key):
        module.register_forward_hook(lambda module, args, out: self.lists and self.lists[key].append(out))

    def active(self):
        return self.lists.values() if self.lists else ()

    @contextlib.contextmanager
    def recording(self):
        self.lists = {"router": [], "mlp": []}
        try:
            yield self.lists
        finally:
            self.lists = None


@pytest.mark.parametrize("recompute", [False, True])
def test_what_hooks_record_comes_out_once_a_block_in_the_order_of_the_batch(recompute):
    x, found = rand(5, S, H).requires_grad_(), []
    for size in (9, 2):
        recorder, blocks = Recorder(), nn.ModuleList([Block(1), Block(2)])
        around = AROUND[recompute]
        for i, block in enumerate(blocks):
            recorder.listen(block.router, "router")
            recorder.listen(block.fc1, "mlp")
            micro(block, f"layers.{i}", size, around, side_outputs=[recorder.active])
        hidden = x
        with recorder.recording() as lists:
            for block in blocks:
                hidden = block(hidden)
            logits = torch.cat(lists["router"])
            assert [one.shape for one in lists["router"]] == [(5 * S, E)] * 2
            assert [one.shape for one in lists["mlp"]] == [(5, S, 5)] * 2
            loss = weigh(hidden) + (logits.softmax(-1).mean(0) * logits.mean(0)).sum()
        x.grad = None
        loss.backward()
        found.append((loss.detach(), lists, x.grad, {n: p.grad for n, p in blocks.named_parameters()}))
    same(found[1], found[0])


def test_hooks_that_record_unequally_are_refused():
    lists = [[]]
    block = ChunkMBS(ChunkMBSConfig(), side_outputs=[lambda: lists])
    forward = block.wrap("layers.0", lambda x: (lists[0].append(x) if x[0, 0] else None) or x, lambda x: None)
    with pytest.raises(CannotCut, match=r"^ChunkMBS, layers\.0: .*hooks recorded \[1, 0, 1\]"):
        forward(torch.tensor([[1.0], [0.0], [2.0]]))


def test_transformers_router_logits_and_auxiliary_loss():
    transformers = pytest.importorskip("transformers", minversion="5.2")
    config = transformers.Qwen3_5MoeConfig.from_pretrained(TINY)
    config.text_config.num_hidden_layers, config.text_config.layer_types = 2, ["linear_attention", "full_attention"]
    config.text_config.router_aux_loss_coef = 0.5
    torch.manual_seed(0)
    config.text_config._experts_implementation = "eager"  # the others have no fp64
    model = transformers.Qwen3_5MoeForConditionalGeneration._from_config(config, dtype=torch.float64)
    ids = torch.randint(250, (5, 8))
    mask = torch.ones_like(ids)
    mask[3, 6:] = 0
    found = []
    for size in (9, 2):
        for i, layer in enumerate(model.model.language_model.layers):
            micro(layer, f"layers.{i}", size, side_outputs=[transformers_outputs])
        with observe() as events:
            out = model(input_ids=ids, attention_mask=mask, labels=ids, output_router_logits=True, use_cache=False)
        assert sum(event.kind == "micro_chunk" for event in events) == (0 if size == 9 else 6)
        model.zero_grad()
        out.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((out.loss.detach(), out.aux_loss.detach(), out.router_logits, grads))
        assert [tuple(logits.shape) for logits in out.router_logits] == [(5 * 8, config.text_config.num_experts)] * 2
    assert any("mlp.gate" in name for name in found[0][3])
    same(found[1], found[0], 1e-5)  # parts of the model compute in fp32


def on_ranks(rank, world_size, cases):
    """Each case: (batch, keyword arguments) of either rank. What was raised, or the distance to the whole batch's."""
    options = {"group": dist.group.WORLD, "batch_sizes": (5, 6)}
    chunk = ChunkMBS(ChunkMBSConfig(chunk_mbs=2, chunk_kwarg_names=["attention_mask"]), **options)
    blocks = [Block(1), Block(2)]
    for i, block in enumerate(blocks):
        block.forward = chunk.wrap(f"layers.{i}", block.forward, block.forward)
    told = []
    for pair in (*cases, ((6, {}), (5, {}))):
        batch, kwargs = pair[rank]
        x = rand(batch, S, H)
        with observe() as events:
            try:
                out = blocks[1](blocks[0](x, **kwargs))
                told.append((out - Block(2)(Block(1)(x, **kwargs))).detach().abs().sum().item())
            except CannotCut as error:
                told.append(str(error))
        assert sum(event.kind == "all_gather" for event in events) == 1  # a pass, not a block
    return told


def test_ranks_with_different_numbers_of_micro_chunks_are_told_so_and_nothing_hangs():
    packed, wrong = {"cu_seqlens": torch.tensor([0, 3])}, {"attention_mask": rand(4, 1, 1)}
    cases = [
        ((5, {}), (3, {})),
        ((1, {}), (5, {})),
        ((5, {}), (0, {})),
        ((5, packed), (5, {})),
        ((5, {}), (5, wrong)),
        ((5, packed), (5, wrong)),
        ((3, {}), (4, {})),  # the last batch is short on both
        ((2, {}), (0, {})),
    ]
    first, second = run_ranks(on_ranks, 2, cases)
    beginning = "ChunkMBS, layers.0: every rank must run the same number of micro-chunks, but there are "
    for told in (first, second):
        assert told[0].startswith(f"{beginning}3 on rank 0, 2 on rank 1; ")
        assert told[1].startswith(f"{beginning}1 on rank 0, 3 on rank 1; ")
        assert told[2].startswith(f"{beginning}3 on rank 0, 1 on rank 1; ")
        assert max(told[6:]) < 1e-10 and len(told) == 9
        assert not any("\n" in text for text in told[:6])
    for told in (first[3], first[5]):
        assert told.startswith("ChunkMBS, layers.0: cu_seqlens: samples packed")
    assert second[3].startswith(f"{beginning}an error on rank 0, 3 on rank 1; ")
    assert first[4].startswith(f"{beginning}3 on rank 0, an error on rank 1; ")
    for told in (second[4], second[5]):
        assert told.startswith("ChunkMBS, layers.0: attention_mask: [4, 1, 1]: dimension 0 must have the batch's 5 ")


class Failing(torch.autograd.Function):
    """Raises in the forward or in the backward, the second time that it gets there."""

    @staticmethod
    def forward(ctx, x, counts, where):
        ctx.counts, ctx.where = counts, where
        counts["forward"] += 1
        if where == "forward" and counts["forward"] == 2:
            raise RuntimeError("no")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.counts["backward"] += 1
        if ctx.where == "backward" and ctx.counts["backward"] == 2:
            raise RuntimeError("no")
        return grad, None, None


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_exception_in_a_micro_chunk_leaves_nothing_behind(where, recompute, monkeypatch):
    monkeypatch.setattr("mindspeed_chunk.mbs.offload._LEAST_BYTES", 0)
    x, kwargs = rand(5, S, H).requires_grad_(), arguments(5)
    expected = results(Block(), x, kwargs, weigh)
    block, recorder, offload = Block(), Recorder(), ActivationOffload()
    counts, mode = {"forward": 0, "backward": 0}, [where]
    recorder.listen(block.router, "router")
    block.fc1.register_forward_hook(lambda module, args, out: Failing.apply(out, counts, mode[0]))
    if recompute:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    block.forward = offload.wrap("block", block)
    micro(block, side_outputs=[recorder.active])
    with recorder.recording(), pytest.raises(RuntimeError, match="no"), observe() as events:
        results(block, x, kwargs, weigh)
    assert any(event.kind == "offload" for event in events)
    with pytest.raises(RuntimeError, match="empty"):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    mode[0] = None

    def loss_after_recording(out):
        assert [len(one) for one in recorder.lists["router"]] == [5 * S]
        recorder.lists = None
        return weigh(out)

    with recorder.recording():
        same(results(block, x, kwargs, loss_after_recording), expected)


def test_wrappers_stand_in_one_order():
    log = []

    class Logged(nn.Module):
        def forward(self, hidden_states, extra=None):
            log.append(("block", len(hidden_states)))
            return hidden_states

    def wrapper(kind):
        def wrap(name, module):
            forward = module.forward
            return lambda *args, **kwargs: log.append((kind, len(args[0]))) or forward(*args, **kwargs)

        return wrap

    block, other = Logged(), Logged()
    chunk = ChunkMBS(ChunkMBSConfig(chunk_mbs=2, chunk_arg_indexs=[0, 1]))
    named = {"layers.0": block}
    wrap_blocks(
        {**named, "other": other}, named, named,
        recomputed=wrapper("recompute"), offloaded=wrapper("offload"), chunked=chunk.wrap,
    )  # fmt: skip
    # an argument that is named by its position is found although the wrappers hide the names
    block(rand(3, 2), extra=rand(3, 1))
    inside = ["offload", "recompute", "block"]
    assert log == [(kind, length) for length in (2, 1) for kind in inside]
    log.clear()
    other(rand(3, 2))
    assert log == [("recompute", 3), ("block", 3)]
    with pytest.raises(CannotCut, match="extra"):
        block(rand(3, 2), extra=rand(2, 1))


@pytest.mark.parametrize("around", AROUND)
def test_a_second_derivative_is_that_of_the_whole_batch(around):
    x, outer, found = rand(5, S, H).requires_grad_(), rand(5, S, H), []
    for size in (9, 2):
        block = micro(Block(), size=size, around=around)
        (grad,) = torch.autograd.grad((block(x) * outer).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.pow(2).sum(), (x, block.fc1.weight)))
    assert all(torch.allclose(got, want, rtol=1e-9, atol=1e-9) for got, want in zip(*found, strict=True))
