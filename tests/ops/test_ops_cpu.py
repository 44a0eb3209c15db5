"""The CPU back end, one operation at a time, and the packed rows."""

import importlib
import inspect
import itertools
import logging
import weakref

import pytest
import torch

from mindspeed_chunk import log, ops
from mindspeed_chunk.moe import reference
from mindspeed_chunk.moe.packing import packed_weight, packed_width
from mindspeed_chunk.ops import BACK_ENDS, cpu
from mindspeed_chunk.ops.groups import Groups

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", BACK_ENDS)
def test_every_back_end_has_the_functions_of_the_cpus_with_their_parameters(name):
    back_end = importlib.import_module(f"mindspeed_chunk.ops.{name}")
    functions = [each for each in vars(cpu).values() if inspect.isfunction(each) and each.__module__ == cpu.__name__]
    public = [each for each in functions if not each.__name__.startswith("_")]
    assert {each.__name__ for each in public} == {each for each in vars(ops.BackEnd) if not each.startswith("_")}
    for each in public:
        assert inspect.signature(getattr(back_end, each.__name__)) == inspect.signature(each)


def routed(tokens=9, top_k=3, experts=5, seed=0):
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).topk(top_k).indices


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_moves_rows_bit_for_bit_in_expert_order_ties_in_token_order(dtype):
    x_TH, route_TK = torch.randn(9, 4).to(dtype), routed()
    rows_RH, order_R = cpu.permute(x_TH, route_TK)
    expected = sorted((expert, token, k) for token, row in enumerate(route_TK.tolist()) for k, expert in enumerate(row))
    assert order_R.tolist() == [token * 3 + k for _, token, k in expected]
    assert torch.equal(rows_RH, torch.stack([x_TH[token] for _, token, _ in expected]))
    assert torch.equal(cpu.unpermute_backward(x_TH, order_R, 3), rows_RH)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpermute_is_the_weighted_sum_and_permute_backward_the_plain_one(dtype):
    tokens, top_k = 9, 3
    _, order_R = cpu.permute(torch.zeros(tokens, 1), routed())
    rows_RH, weight_TK = torch.randn(tokens * top_k, 6).to(dtype), torch.rand(tokens, top_k).to(dtype)
    back = torch.zeros(tokens, top_k, 6, dtype=torch.float64)
    for row, place in zip(rows_RH.double(), order_R.tolist(), strict=True):
        back[place // top_k, place % top_k] = row
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    weighted = cpu.unpermute(rows_RH, order_R, weight_TK)
    assert weighted.dtype == dtype
    assert torch.allclose(weighted.double(), (back * weight_TK.double()[..., None]).sum(1), atol=tolerance)
    assert torch.allclose(cpu.permute_backward(rows_RH, order_R, top_k).double(), back.sum(1), atol=tolerance)


def test_unpermute_takes_the_dtype_of_the_weights():
    _, order_R = cpu.permute(torch.zeros(9, 1), routed())
    out = cpu.unpermute(torch.randn(27, 4).bfloat16(), order_R, torch.rand(9, 3))
    assert out.dtype == torch.float32


def test_permutation_is_exact_past_the_integers_of_fp32():
    """Sorting or counting in fp32 goes wrong there."""
    big = 2**24
    route_TK = torch.tensor([[big + 1], [big], [big + 3], [big + 2]])
    assert cpu.permute(torch.zeros(4, 1), route_TK)[1].tolist() == [1, 0, 3, 2]
    counts = cpu.count(torch.ones(big + 3, dtype=torch.int64), 2)
    assert counts.dtype == torch.int64 and counts.tolist() == [0, big + 3]


COUNTS = [((2, 0, 3), (1, 4, 0)), ((0, 0), (0, 0)), ((3, 1, 2),), ((2,), (5,)), ((0, 2), (0, 1))]


@pytest.mark.parametrize("counts", COUNTS)
def test_regroup_there_and_back(counts):
    labels = [(s, e, n) for s, row in enumerate(counts) for e, count in enumerate(row) for n in range(count)]
    rows = torch.arange(len(labels), dtype=torch.float32)[:, None].repeat(1, 3)
    groups = Groups.of(counts)
    grouped = cpu.regroup(rows, groups)
    expected = sorted(range(len(labels)), key=lambda i: (labels[i][1], labels[i][0], labels[i][2]))
    assert grouped[:, 0].tolist() == expected
    assert torch.equal(cpu.regroup_backward(grouped, groups), rows)


CHUNKS = [((2, 0, 3), (1, 4, 0)), ((0, 0, 0), (0, 0, 0)), ((0, 1, 0), (5, 0, 2))]


def test_what_kernels_read_of_all_chunks_is_made_at_once_and_right_for_each():
    for groups, counts in zip(Groups.of_chunks(CHUNKS, torch.tensor(CHUNKS)), CHUNKS, strict=True):
        places = torch.arange(groups.num_rows, dtype=torch.int32)
        assert torch.equal(groups.to_experts, cpu.regroup(places, groups))
        assert torch.equal(groups.to_sources, cpu.regroup_backward(places, groups))
        assert groups.on_device.tolist() == [list(row) for row in counts]
        assert groups.of_experts.tolist() == list(groups.rows_per_expert) and groups.of_experts.dtype == torch.int64
        ends = list(itertools.accumulate(groups.rows_per_expert))
        assert groups.ends.tolist() == groups.long_ends.tolist() == ends
        assert (groups.ends.dtype, groups.long_ends.dtype) == (torch.int32, torch.int64)
    nothing = Groups.of(CHUNKS[1])
    assert nothing.to_experts.numel() == nothing.to_sources.numel() == 0


def test_the_orders_of_a_direction_are_freed_with_it():
    kept = Groups.of_chunks(CHUNKS, torch.tensor(CHUNKS))
    here = Groups.for_direction(kept)
    assert here == kept and here[0].to_experts is not kept[0].to_experts
    order = weakref.ref(here[0].to_experts.untyped_storage())
    del here
    assert order() is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strided, transposed", list(itertools.product((False, True), repeat=2)))
def test_grouped_mm_and_its_weight_gradient(dtype, strided, transposed):
    rows_per_expert, hidden, width = (2, 0, 5, 1), 6, 10
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, hidden + 4, generator=generator).to(dtype)[:, :hidden]
    weight = torch.randn(4, hidden, width, generator=generator).to(dtype)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    buffer = torch.full((8, width + 4), float("nan"), dtype=dtype)
    out = cpu.grouped_mm(rows, weight, Groups.of([rows_per_expert]), out=buffer[:, :width] if strided else None)
    grad = torch.randn(8, width, generator=generator).to(dtype)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = torch.ones(4, hidden, width, dtype=wide)
    if transposed:
        total = total.transpose(1, 2).contiguous().transpose(1, 2)
    cpu.grouped_mm_wgrad(rows, grad, Groups.of([rows_per_expert]), total)

    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    start = 0
    for expert, n in enumerate(rows_per_expert):
        own = slice(start, start + n)
        assert torch.allclose(out[own].double(), rows[own].double() @ weight[expert].double(), atol=tolerance)
        expected = 1 + rows[own].double().T @ grad[own].double()
        assert torch.allclose(total[expert].double(), expected, atol=tolerance)
        start += n
    if strided:
        assert buffer[:, width:].isnan().all()  # nothing beside the rows is touched


@pytest.mark.parametrize("limit", [0.0, 0.4])
def test_swiglu_and_its_gradient(limit):
    fc1 = torch.randn(7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = reference.swiglu(fc1, limit)
    grad = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(cpu.swiglu(fc1.detach(), limit), expected, atol=1e-15)
    (wanted,) = torch.autograd.grad(expected, fc1, grad)
    kept, reused = fc1.detach().clone(), fc1.detach().clone()
    assert torch.allclose(cpu.swiglu_backward(grad.clone(), kept, limit, reuse=False), wanted, atol=1e-15)
    assert torch.equal(kept, fc1)
    again = cpu.swiglu_backward(grad.clone(), reused, limit, reuse=True)
    assert again.data_ptr() == reused.data_ptr() and torch.allclose(again, wanted, atol=1e-15)


def test_clamped_swiglu_at_the_limit_has_the_gradient_of_clamp():
    fc1 = torch.tensor([[0.5, -0.5, 2.0, 0.5, -0.5, -2.0]], dtype=torch.float64).requires_grad_()
    (wanted,) = torch.autograd.grad(reference.swiglu(fc1, 0.5).sum(), fc1)
    got = cpu.swiglu_backward(torch.ones(1, 3, dtype=torch.float64), fc1.detach(), 0.5, reuse=False)
    assert torch.allclose(got, wanted)


@pytest.mark.parametrize("rows, number", list(itertools.product(DTYPES, repeat=2)), ids=str)
def test_packed_rows_carry_a_number_of_any_dtype_and_stay_aligned(rows, number):
    for hidden in (0, 1, 7, 8, 33):
        width = packed_width(hidden, rows)
        assert width * rows.itemsize % 16 == 0 and width * rows.itemsize >= hidden * rows.itemsize + number.itemsize
        packed = torch.zeros(5, width, dtype=rows)
        packed[:, :hidden] = torch.randn(5, hidden).to(rows)
        before, numbers = packed[:, :hidden].clone(), torch.randn(5).to(number)
        packed_weight(packed, hidden, number).copy_(numbers)
        assert torch.equal(packed[:, :hidden], before)
        assert torch.equal(packed_weight(packed.clone(), hidden, number), numbers)
    assert packed_weight(torch.zeros(0, packed_width(3, rows), dtype=rows), 3, number).shape == (0,)


@pytest.mark.parametrize("counts", [[[3, 0, 2], [1, 4, 0]], [[5, 2, 1]], [[2], [3]], [[0, 0], [0, 0]]], ids=str)
def test_products_in_sending_order_are_the_products_put_in_that_order(counts):
    groups = Groups.of(counts)
    rows, weight = torch.randn(groups.num_rows, 4), torch.randn(len(groups.rows_per_expert), 4, 6)
    expected = cpu.regroup_backward(cpu.grouped_mm(rows, weight, groups), groups)
    assert torch.equal(cpu.grouped_mm_back(rows, weight, groups), expected)
    strided = torch.full((len(rows), 9), float("nan"))
    cpu.grouped_mm_back(rows, weight, groups, out=strided[:, :6])
    assert torch.equal(strided[:, :6], expected) and strided[:, 6:].isnan().all()


def test_a_wrong_rank_in_the_environment_does_not_end_a_line_of_the_log(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "none")
    log.say(logging.WARNING, "a line")
    assert not caplog.records


def test_the_chosen_back_end_is_told_once_and_not_before_anybody_can_read_it(caplog, monkeypatch):
    """The host checks its settings, and with them the back end, before it sets the level of its log."""
    monkeypatch.setattr(log, "_said", set())
    for level in (logging.WARNING, logging.INFO, logging.INFO):
        with caplog.at_level(level, "mindspeed_chunk"):
            ops.resolve("auto", torch.device("cpu"))
    assert [record.getMessage() for record in caplog.records] == [
        "mindspeed_chunk: Chunk MoE: back end cpu, chosen by the device"
    ]
