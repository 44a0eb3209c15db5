"""The layer on one rank against the reference: values, gradients, dtypes, frozen inputs, autocast, checkpointing."""

import itertools
import logging

import pytest
import torch

from layer import Case, Layer, check, distance, recomputed
from mindspeed_chunk import log
from mindspeed_chunk.config import KEEPS, SCHEDULES, ChunkMoEConfig
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher

F64 = Case()


@pytest.fixture(autouse=True)
def fresh_buffers_hold_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("keep", KEEPS)
def test_matches_the_reference(dtype, schedule, keep):
    for chunks, layout in itertools.product((1, 2, 3, 5), ("LHF", "LFH")):
        check(Case(chunks=chunks, layout=layout, dtype=dtype, schedule=schedule, keep=keep))


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 0.5},
        {"padded": True},
        {"padded": True, "router_dtype": torch.float32, "dtype": torch.bfloat16},
        {"dense_weights": True},
        {"dense_weights": True, "padded": True},
        {"activation": "module"},
        {"activation": "module", "keep": "rows", "frozen": ("activation",)},
        {"router_dtype": torch.float32, "dtype": torch.bfloat16},
        {"router_dtype": torch.float64, "dtype": torch.float32, "hidden": 7},
        {"tokens": (3,), "chunks": 8},
        {"tokens": (7,), "top_k": 1, "routing": "first"},
        {"tokens": (7,), "top_k": 1, "routing": "last"},
        {"tokens": (0,)},
        {"tokens": (1,), "chunks": 4},
        {"chunk_size": 4, "chunks": 0},
        {"chunk_size": 100, "chunks": 0},
        {"chunk_size": 0, "chunks": 0},
        {"experts": 1, "top_k": 1},
    ],
    ids=str,
)
def test_matches_the_reference_when(change):
    check(Case(**{"chunks": 3, **change}))


INPUTS = ("x", "weight", "fc1", "fc2")


@pytest.mark.parametrize("frozen", [f for n in range(5) for f in itertools.combinations(INPUTS, n)])
def test_frozen_inputs_alone_and_together(frozen):
    for keep, activation in itertools.product(KEEPS, (None, "module")):
        case = Case(chunks=3, frozen=frozen, keep=keep, activation=activation)
        check(case)
        if activation:
            check(Case(chunks=3, frozen=(*frozen, "activation"), keep=keep, activation=activation))


@pytest.mark.parametrize(
    "options", [{}, *({"chunk_moe_keep": keep} for keep in KEEPS[1:]), {"chunk_moe_schedule": "pair"}]
)
@pytest.mark.parametrize("limit", [0.0, 0.3])
def test_gradcheck(options, limit):
    layer = Layer(Case(tokens=(5,), hidden=4, intermediate=3, experts=4, top_k=2))
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=2, **options))

    def function(x, weight, fc1, fc2):
        return dispatcher(4, weight, layer.index, x, fc1, fc2, swiglu_limit=limit)

    inputs = [t.clone().requires_grad_() for t in (layer.x, layer.weight, layer.fc1_EHF, layer.fc2_EIH)]
    assert torch.autograd.gradcheck(function, inputs)


def test_no_grad_and_inference_mode_give_the_same_output():
    layer = Layer(Case(chunks=3))
    expected = layer.fast()["out"]
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = layer.call(ChunkMoEDispatcher(layer.case.config()), leaves)
        assert not out.requires_grad and torch.equal(out, expected)


@pytest.mark.parametrize("reduce", [torch.sum, lambda out: out.t().contiguous().sum(), lambda out: out[:, ::2].sum()])
def test_expanded_and_strided_incoming_gradients(reduce):
    layer = Layer(Case(chunks=3))
    dispatcher = ChunkMoEDispatcher(layer.case.config())
    tensors = {"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH}
    fast, plain = layer.leaves(tensors), layer.leaves(tensors)
    reduce(layer.call(dispatcher, fast)).backward()
    from mindspeed_chunk.moe.alltoall import AllToAllDispatcher

    reduce(layer.call(AllToAllDispatcher(), plain)).backward()
    errors = distance({n: t.grad for n, t in fast.items()}, {n: t.grad for n, t in plain.items()})
    assert max(errors.values()) < 1e-12


def test_non_contiguous_inputs():
    layer = Layer(Case(chunks=2))
    expected = layer.fast()
    layer.x = layer.x.t().contiguous().t()
    layer.weight = layer.weight.t().contiguous().t()
    layer.index = layer.index.t().contiguous().t()
    assert max(distance(layer.fast(), expected).values()) == 0


def test_int32_ids():
    layer = Layer(Case(chunks=2))
    expected = layer.fast()
    layer.index = layer.index.to(torch.int32)
    assert max(distance(layer.fast(), expected).values()) == 0


def test_chunks_change_no_row_that_is_only_moved():
    """An expert that copies its input and weights of one: tokens come back bit for bit, times K."""
    layer = Layer(Case(hidden=6, intermediate=6, top_k=1, dtype=torch.float32))
    eye = torch.eye(6).repeat(8, 1, 1)
    fc1 = torch.cat([torch.zeros_like(eye), eye], dim=2)
    for chunks in (1, 2, 3, 13):
        out = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=chunks))(
            8, torch.ones(13, 1), layer.index, layer.x, fc1, eye, activation=lambda fc1_RF: fc1_RF[:, 6:]
        )
        assert torch.equal(out, layer.x)


def test_number_of_chunks_changes_nothing_but_the_order_of_sums():
    for keep in KEEPS:
        one = Layer(Case(chunks=1, dtype=torch.float32, keep=keep)).fast()
        four = Layer(Case(chunks=4, dtype=torch.float32, keep=keep)).fast()
        # a token's rows do not depend on its chunk; the weights' gradients are sums over chunks
        for name in ("out", "weight"):
            assert distance({name: four[name]}, {name: one[name]})[name] < 1e-6
        assert max(distance(four, one).values()) < 1e-5


def test_recompute_of_experts_is_bit_equal():
    for activation in (None, "module"):
        kept, again = (Layer(Case(chunks=3, keep=keep, activation=activation)).fast() for keep in KEEPS[:2])
        assert max(distance(again, kept).values()) == 0


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("activation", [None, "module"])
def test_autocast(keep, activation):
    """fp32 inputs under bf16 autocast: gradients keep their dtypes, and the backward works outside of the context."""
    layer = Layer(Case(chunks=3, dtype=torch.float32, keep=keep, activation=activation))
    expected = layer.fast()
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer.call(ChunkMoEDispatcher(layer.case.config()), leaves)
    assert out.dtype == torch.float32
    out.backward(layer.grad)
    assert {t.grad.dtype for t in leaves.values()} == {torch.float32}
    errors = distance(layer._results(out, leaves), expected)
    assert 0 < max(errors.values()) < 3e-2, errors


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant):
    """From the first call on, which tries the activation out."""
    for keep, activation in itertools.product(KEEPS, (None, "module")):
        layer = Layer(Case(chunks=3, keep=keep, activation=activation))
        expected = layer.fast()
        leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
        dispatcher = ChunkMoEDispatcher(layer.case.config())

        def call(x, layer=layer, leaves=leaves, dispatcher=dispatcher):
            return layer.call(dispatcher, {**leaves, "x": x})

        out = recomputed(call, leaves["x"], reentrant=reentrant)
        out.backward(layer.grad)
        assert max(distance(layer._results(out, leaves), expected).values()) == 0


def test_backward_twice_with_a_retained_graph():
    for keep, activation in itertools.product(KEEPS, (None, "module")):
        layer = Layer(Case(chunks=3, keep=keep, activation=activation))
        leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
        out = layer.call(ChunkMoEDispatcher(layer.case.config()), leaves)
        first = torch.autograd.grad(out, list(leaves.values()), layer.grad, retain_graph=True)
        second = torch.autograd.grad(out, list(leaves.values()), layer.grad)
        assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("name", ["x", "weight", "fc1", "fc2", "activation"])
def test_a_second_derivative_is_refused_clearly(name, constant):
    """Whether or not the incoming gradient has a derivative itself, and although another term has a second one."""
    layer = Layer(Case(chunks=2, activation="module"))
    leaves = layer.leaves({"x": layer.x, "weight": layer.weight, "fc1": layer.fc1_EHF, "fc2": layer.fc2_EIH})
    out = layer.call(ChunkMoEDispatcher(layer.case.config()), leaves)
    leaf = layer.activation.scale if name == "activation" else leaves[name]
    outer = layer.grad.requires_grad_(not constant)
    (grad,) = torch.autograd.grad((out * outer).sum() + leaf.pow(3).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.pow(2).sum().backward()


def test_the_plain_dispatcher_has_its_second_derivative():
    layer = Layer(Case(tokens=(5,), hidden=4, intermediate=3, experts=4, top_k=2))

    def function(x, weight, fc1, fc2):
        return AllToAllDispatcher()(4, weight, layer.index, x, fc1, fc2)

    inputs = [t.clone().requires_grad_() for t in (layer.x, layer.weight, layer.fc1_EHF, layer.fc2_EIH)]
    assert torch.autograd.gradgradcheck(function, inputs)


def test_weight_gradients_of_bf16_are_summed_in_fp32():
    """512 chunks that add 1 each: a sum in bf16 sticks at 256."""
    tokens = 512
    fc1, fc2 = torch.ones(1, 4, 2, dtype=torch.bfloat16), torch.ones(1, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=tokens))
    ones = torch.ones(tokens, 1, dtype=torch.bfloat16)
    out = dispatcher(
        1,
        ones,
        torch.zeros_like(ones, dtype=torch.int64),
        ones.expand(-1, 4),
        fc1,
        fc2,
        activation=lambda f: f[:, :1] / 4,
    )
    out.sum().backward()
    assert fc2.grad.flatten().tolist() == [tokens] * 4


def test_activation_gradients_of_bf16_are_summed_in_fp32():
    """The same of an activation's parameter: an output of 1 for each of its values, in 512 chunks."""

    class Shift(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros((), dtype=torch.bfloat16))

        def forward(self, fc1_RF):
            return fc1_RF[:, :1] + self.shift

    tokens, shift = 512, Shift()
    ones = torch.ones(tokens, 1, dtype=torch.bfloat16)
    out = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=tokens))(
        1, ones, torch.zeros_like(ones, dtype=torch.int64), ones, ones[:1, None].expand(-1, -1, 2), ones[:1, None],
        activation=shift,
    )  # fmt: skip
    out.sum().backward()
    assert shift.shift.grad.item() == tokens


def test_router_gradients_of_bf16_rows_are_summed_in_fp32():
    from mindspeed_chunk.moe.experts import _row_dot

    left, right = torch.rand(2, 50, 333, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = (left.double() * right.double()).sum(-1)
    assert ((_row_dot(left, right) - exact).abs() / exact).max() < 1e-6


def test_more_chunks_than_tokens_is_told_once_and_only_in_training(caplog):
    def told(tokens, grad=True):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mindspeed_chunk"), torch.set_grad_enabled(grad):
            Layer(Case(chunks=4, tokens=(tokens,))).fast(dispatcher)
        return [record.getMessage() for record in caplog.records]

    log._said.clear()
    dispatcher = ChunkMoEDispatcher(ChunkMoEConfig(moe_num_chunks=4))
    assert told(4) == told(0) == told(3, grad=False) == []
    (line,) = told(3)
    assert "moe_num_chunks: 4: more chunks than the 3 tokens of a call" in line
    assert told(2) == []
