"""Offload of what blocks save: equal gradients, and the order of the transfers."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_chunk.config import ChunkMBSConfig
from mindspeed_chunk.mbs.block import ChunkMBS, wrap_blocks
from mindspeed_chunk.observe import observe
from offloaded import ROWS, H, Table, blocks, equal, make, rand, run


@pytest.mark.parametrize("recompute", ["", "block", "part"])
@pytest.mark.parametrize("late", [False, True])
def test_gradients_are_bit_equal_and_every_buffer_comes_back(recompute, late):
    x, offload = rand(ROWS, H), make(late)
    for passes in (1, 2):
        expected = run(blocks(recompute=recompute), x, passes=passes)
        with observe() as events:
            equal(run(blocks(offload, recompute=recompute), x, passes=passes), expected)
        assert {event.detail["to"] for event in events if event.kind == "offload"} == {"host", "device"}
        assert offload.pool.out == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_the_offload(reentrant):
    x, offload = rand(ROWS, H), make()
    expected = run(blocks(), x)
    modules = blocks(offload)
    for block in modules:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    equal(run(modules, x), expected)
    assert offload.pool.out == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_micro_chunks_with_recompute_and_offload(late, recompute):
    x, offload, found = rand(5, ROWS, H), make(late), []
    for wrapped in (False, True):
        modules = blocks(count=3)
        named = {block.name: block for block in modules}
        chunk = ChunkMBS(ChunkMBSConfig(chunk_mbs=2))
        wrap_blocks(
            named if recompute else {}, named if wrapped else {}, named,
            recomputed=lambda name, module: partial(checkpoint, module.forward, use_reentrant=False),
            offloaded=offload.wrap, chunked=chunk.wrap,
        )  # fmt: skip
        with observe() as events:
            found.append(run(modules, x))
        sent = {(event.name, event.detail["to"]) for event in events if event.kind == "offload"}
        assert sent == ({(name, to) for name in "abc" for to in ("host", "device")} if wrapped else set())
    equal(found[1], found[0])
    assert offload.pool.out == 0


def timeline(events):
    """Marks, and runs of transfers as one entry each."""
    told = []
    for event in events:
        one = event.name if event.kind == "mark" else f"{event.name} to {event.detail['to']}"
        if event.kind in ("mark", "offload") and told[-1:] != [one]:
            told.append(one)
    return told


@pytest.mark.parametrize("recompute", ["", "block", "part"])
def test_the_order_of_the_transfers(recompute):
    with observe() as events:
        run(blocks(make(), recompute=recompute), rand(ROWS, H))
    told = timeline(events)
    assert told[:7] == ["forward a", "a to host", "forward b", "b to host", "forward c", "c to host", "forward d"]
    backward = [one for one in told[7:] if not one.startswith("forward")]  # a recompute's
    # the last block needs nothing from the host; while a block runs back, the one before it comes, and no other
    assert backward == [
        "backward d", "c to device", "backward c", "b to device", "backward b", "a to device", "backward a",
    ]  # fmt: skip
    # each tensor once in each direction, the last block's never
    transfers = [(e.name, e.detail["to"], e.detail["bytes"]) for e in events if e.kind == "offload"]
    there = sorted((name, size) for name, to, size in transfers if to == "host")
    back = sorted((name, size) for name, to, size in transfers if to == "device")
    assert there == back and {name for name, _ in there} == set("abc")


@pytest.mark.parametrize("passes", [1, 2])
def test_a_tensor_that_three_ops_saved_is_sent_once_and_fetched_once_a_backward(passes):
    offload = make()
    with observe() as events:
        run(blocks(offload, count=2, depths=(1,)), rand(ROWS, H), passes=passes)
    to_host = [e.detail["bytes"] for e in events if e.kind == "offload" and e.detail["to"] == "host"]
    to_device = [e.detail["bytes"] for e in events if e.kind == "offload" and e.detail["to"] == "device"]
    assert sorted(passes * to_host) == sorted(to_device)
    assert len(to_host) == len(offload.pool.buffers)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_sent(mode):
    x, offload = rand(ROWS, H), make()
    with mode(), observe() as events:
        hidden = [x, x]
        for i, modules in enumerate((blocks(), blocks(offload))):
            for module in modules:
                hidden[i] = module(hidden[i])
    assert torch.equal(*hidden) and not offload.pool.buffers
    assert not any(event.kind == "offload" for event in events)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("between", ["", "no_grad", "dropped graph"])
def test_two_forwards_and_an_evaluation_before_two_backwards(late, order, between):
    first, second, offload = rand(ROWS, H), rand(ROWS + 1, H), make(late)
    found = []
    for modules in (blocks(), blocks(offload)):
        leaves = [x.clone().requires_grad_() for x in (first, second)]
        outs = []
        for leaf in leaves:
            hidden = leaf * 1
            for module in modules:
                hidden = module(hidden)
            outs.append(hidden)
        if between:
            with torch.set_grad_enabled(between != "no_grad"), observe() as events:
                hidden = first.clone().requires_grad_()
                for module in modules:
                    hidden = module(hidden)
            assert between != "no_grad" or not any(event.kind == "offload" for event in events)
        for i in order:
            outs[i].square().sum().backward()
        found.append([leaf.grad for leaf in leaves] + [p.grad for p in modules.parameters()])
    hidden = None
    equal(found[1], found[0])
    assert offload.pool.out == 0


def test_a_block_that_is_called_without_tensors():
    plain, wrapped = Table(), Table()
    plain().sum().backward()
    make().wrap("table", wrapped)().sum().backward()
    assert torch.equal(wrapped.weight.grad, plain.weight.grad)


def test_gradients_of_gradients():
    x, found, offload = rand(ROWS, H).requires_grad_(), [], make(late=True)
    for modules in (blocks(count=2), blocks(offload, count=2)):
        hidden = x * 1
        for module in modules:
            hidden = module(hidden)
        (of_x,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
        found.append([of_x.detach(), *torch.autograd.grad(of_x.square().sum(), [x, modules[0].inner.weight])])
        del hidden, of_x
    equal(found[1], found[0])
    assert offload.pool.out == 0
