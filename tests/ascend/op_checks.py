"""What is checked of each function of the NPU back end, in the process that has the wheel. Called with the back end."""

import contextlib
import itertools
import logging
import types
from unittest import mock

import torch

from ascend import kernels
from mindspeed_chunk import log, ops
from mindspeed_chunk.ops import cpu, npu_ops
from mindspeed_chunk.ops.groups import Groups

# fp64 has no kernel: it takes the eager form of everything.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5, torch.float64: 1e-12}
COUNTS = (((2, 1, 3), (1, 4, 2)), ((2, 0, 3), (1, 4, 0)), ((0, 0), (0, 0)), ((3, 0, 2, 1),), ((2,), (5,)), ((4,),))


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(tokens=9, top_k=3, experts=5):
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices


def same(got, want):
    assert got.dtype == want.dtype and torch.equal(got, want), f"{got}\n{want}"


def near(got, want, dtype=None):
    """Args:
    dtype: the narrowest on the way, if not that of the result.
    """
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, want.dtype, got.shape, want.shape)
    worst = ((got - want).abs().max() / want.abs().max()).nan_to_num(float("inf")).item() if want.numel() else 0
    assert worst <= TOLERANCE[dtype or got.dtype], f"off by {worst:.1e} of the largest value"


def moved_rows(npu):
    for dtype, tokens in itertools.product(DTYPES, (9, 0)):
        x_TH, route_TK = normal(tokens, 4, dtype=dtype), routed(tokens)
        rows_RH, order_R = npu.permute(x_TH, route_TK)
        want_RH, pair_R = cpu.permute(x_TH, route_TK)
        same(rows_RH, want_RH)
        same(pair_R[order_R.long()], torch.arange(tokens * 3))
        assert order_R.dtype == torch.int32
        same(npu.pairs(order_R).long(), pair_R)
        same(npu.unpermute_backward(x_TH, npu.pairs(order_R), 3), want_RH)
        value_TK = normal(tokens, 3, dtype=dtype)
        value_R = npu.rows_of(value_TK, npu.pairs(order_R))
        same(value_R, cpu.rows_of(value_TK, pair_R))
        out_TK, want_TK = torch.empty_like(value_TK), torch.empty_like(value_TK)
        cpu.rows_of_backward(value_R, pair_R, want_TK)
        npu.rows_of_backward(torch.stack([value_R, value_R], 1)[:, 1], order_R, out_TK)
        same(out_TK, want_TK)


def rows_of_some_pairs(npu):
    """The pairs without a row are left out, as the CPU leaves them out."""
    for dtype, num_rows in itertools.product(DTYPES, (0, 1, 11, 26, 27)):
        x_TH, route_TK, weight_TK = normal(9, 8, dtype=dtype), routed(9), normal(9, 3, dtype=dtype, seed=1)
        rows_RH, order_P = npu.permute(x_TH, route_TK.to(torch.int32), num_rows)
        want_RH, pair_P = cpu.permute(x_TH, route_TK, num_rows)
        same(rows_RH, want_RH)
        same(npu.pairs(order_P)[:num_rows].long(), pair_P[:num_rows])
        value_R = npu.rows_of(weight_TK, npu.pairs(order_P)[:num_rows])
        out_TK, want_TK = weight_TK.neg(), weight_TK.neg()
        cpu.rows_of_backward(value_R, pair_P, want_TK)
        npu.rows_of_backward(value_R, order_P, out_TK)
        same(out_TK, want_TK)
        alike = near if num_rows else same
        alike(npu.unpermute(rows_RH, order_P, weight_TK), cpu.unpermute(rows_RH, pair_P, weight_TK))
        alike(npu.permute_backward(rows_RH, order_P, 3), cpu.permute_backward(rows_RH, pair_P, 3))


def summed_rows(npu):
    for dtype, wide, tokens in itertools.product(DTYPES, (False, True), (9, 0)):
        _, order_R = npu.permute(normal(tokens, 1), routed(tokens))
        _, pair_R = cpu.permute(normal(tokens, 1), routed(tokens))
        rows_RH = normal(tokens * 3, 6, dtype=dtype)
        weight_TK = normal(tokens, 3, dtype=torch.float32 if wide and dtype.itemsize < 4 else dtype, seed=1)
        near(npu.unpermute(rows_RH, order_R, weight_TK), cpu.unpermute(rows_RH, pair_R, weight_TK))
        rows_RH[:, 4:] = torch.nan  # the tail of a packed row is no number of this dtype
        got, want = npu.permute_backward(rows_RH, order_R, 3), cpu.permute_backward(rows_RH, pair_R, 3)
        near(got[:, :4], want[:, :4])


def regrouped_rows(npu):
    for counts, dtype, shape in itertools.product(COUNTS, DTYPES, ((3,), ())):
        groups = Groups.of(counts)
        rows = normal(groups.num_rows, *shape, dtype=dtype)
        same(npu.regroup(rows, groups), cpu.regroup(rows, groups))
        same(npu.regroup_backward(rows, groups), cpu.regroup_backward(rows, groups))


def weights(dtype, experts):
    """One matrix an expert, in each of the ways that it may lie in memory."""
    weight = normal(experts, 6, 10, dtype=dtype)
    strided = torch.full((experts, 6, 20), torch.nan, dtype=dtype)[:, :, ::2].copy_(weight)
    return weight, weight.transpose(1, 2).contiguous().transpose(1, 2), strided


def matmuls(npu):
    for counts, dtype in itertools.product(COUNTS, DTYPES):
        groups = Groups.of(counts)
        rows = normal(groups.num_rows, 9, dtype=dtype)[:, :6]
        for weight, strided in itertools.product(weights(dtype, len(counts[0])), (False, True)):
            for name in ("grouped_mm", "grouped_mm_back"):
                buffer = torch.full((groups.num_rows, 13), torch.nan, dtype=dtype)
                out = buffer[:, :10] if strided else None
                got = getattr(npu, name)(rows, weight, groups, out)
                near(got, getattr(cpu, name)(rows, weight, groups))
                assert not strided or (got.data_ptr() == buffer.data_ptr() and buffer[:, 10:].isnan().all())


def weight_gradients(npu):
    for counts, dtype in itertools.product(COUNTS, DTYPES):
        groups = Groups.of(counts)
        rows, grad = normal(groups.num_rows, 9, dtype=dtype)[:, :6], normal(groups.num_rows, 10, dtype=dtype, seed=1)
        for total in weights(torch.float32 if dtype.itemsize == 2 else dtype, len(counts[0])):
            want = total.clone()
            npu.grouped_mm_wgrad(rows, grad, groups, total)
            cpu.grouped_mm_wgrad(rows.to(total.dtype), grad.to(total.dtype), groups, want)
            near(total, want, dtype)


def activations(npu):
    for dtype, limit, rows, reuse in itertools.product(DTYPES, (0.0, 0.4), (7, 0), (False, True)):
        fc1, grad = normal(rows, 10, dtype=dtype), normal(rows, 5, dtype=dtype, seed=1)
        near(npu.swiglu(fc1, limit), cpu.swiglu(fc1, limit))
        kept = fc1.clone()
        got = npu.swiglu_backward(grad.clone(), fc1, limit, reuse=reuse)
        near(got, cpu.swiglu_backward(grad.clone(), kept.clone(), limit, reuse=False))
        assert reuse or torch.equal(fc1, kept)
    edge = torch.tensor([[0.5, -0.5, 2.0, 0.5, -0.5, -2.0]])
    got = npu.swiglu_backward(torch.ones(1, 3), edge, 0.5, reuse=False)
    near(got, cpu.swiglu_backward(torch.ones(1, 3), edge, 0.5, reuse=False))


def counted(npu):
    for keys in (routed(), torch.zeros(0, 3, dtype=torch.int64), torch.full((4, 2), 6)):
        same(npu.count(keys, 7), cpu.count(keys, 7))


def operands(npu):
    """A row with strides is made contiguous, and any other is not copied."""
    rows = normal(5, 8)
    same(npu.operand(rows[:, :6]), rows[:, :6])
    assert npu.operand(rows[:, :6]).is_contiguous() and npu.operand(rows) is rows and cpu.operand(rows) is rows


def ids_out_of_range(npu):
    """They are refused when the plan is read: until then the kernel must not see one below 0."""
    npu.permute(normal(2, 4, dtype=torch.bfloat16), torch.tensor([[0, -1], [9, 3]]))


@contextlib.contextmanager
def logged():
    lines, logger = [], logging.getLogger("mindspeed_chunk")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log._said.clear()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


VALUES = (
    moved_rows,
    rows_of_some_pairs,
    summed_rows,
    regrouped_rows,
    matmuls,
    weight_gradients,
    activations,
    counted,
    operands,
    ids_out_of_range,
)


def missing_ops(npu):
    """Without a single op all values are the same, and each op is told of once."""
    with logged() as lines, mock.patch.object(torch.ops, "npu", types.SimpleNamespace()):
        for check in (*VALUES, *VALUES):
            check(npu)
    assert sorted(lines) == sorted(
        f"mindspeed_chunk: Chunk MoE: this torch_npu has no {name}; torch's own operations run instead"
        for name in npu_ops.OPS
    )


def sizes_out_of_bounds(npu):
    """Beyond a documented limit the eager form runs: limits made small stand for sizes too large for a test."""
    limits = {
        "_MAX_PAIRS": ("npu_moe_token_permute needs at most 1 rows", moved_rows),
        "_MAX_TOP_K": ("npu_moe_token_permute needs at most 1 experts per token", moved_rows),
        "_MAX_GROUPS": ("npu_grouped_matmul needs at most 1 experts", matmuls),
        "_MAX_WIDTH": ("npu_grouped_matmul_add_ needs matrices of at most 1 rows and columns", weight_gradients),
    }
    for name, (told, check) in limits.items():
        with logged() as lines, mock.patch.object(npu, name, 1):
            check(npu)
        assert f"mindspeed_chunk: Chunk MoE: {told}; torch's own operations run instead" in lines, lines


def back_end_that_cannot_be_had(npu):
    device = torch.device("npu")
    assert ops.resolve("npu", device) is npu and ops.resolve("auto", device) is npu
    old = types.SimpleNamespace(__version__="2.6.0.post5")
    for module, told in (
        (None, "torch_npu cannot be imported"),
        (old, "torch_npu 2.6.0.post5: must be 2.7.1 or newer"),
    ):
        npu_ops.require.cache_clear()  # it has found the wheel before
        with mock.patch.dict("sys.modules", {"torch_npu": module}):
            try:
                ops.resolve("npu", device)
            except ValueError as error:
                assert str(error).startswith(f"chunk_moe_backend: 'npu': {told}"), error
            else:
                raise AssertionError(f"{told}: no error")


def documented_dtypes(npu):
    """Where the wheels differ the table is what their documentation says."""
    later = hasattr(torch.ops.npu, npu_ops.LATER)
    for name, parameter in (("npu_moe_token_permute", "tokens"), ("npu_moe_token_unpermute", "permuted_tokens")):
        assert set(npu_ops.OPS[name][later]) == kernels.documented_dtypes(name, parameter), name


CHECKS = {
    check.__name__: check
    for check in (*VALUES, missing_ops, sizes_out_of_bounds, back_end_that_cannot_be_had, documented_dtypes)
}
