"""The NPU back end: torch_npu's aclnn kernels. `cpu.py` documents the arguments and results of each function.

Kernels read `Groups` on the device. The figures on the host give sizes and decide which kernel can be used, so nothing
here waits for the device, and nothing is copied to it. If no kernel can be used, the CPU back end's plain torch runs,
or an eager form in this module.

Some operations of torch have no AiCore kernel for int64, or none at all: they run on the AI CPU, which is slow, and on
some products also drives the all-to-alls. Others move one element at a time. `tests/ascend/costs.py` has the list, and
its test counts what a layer call uses.

R rows routed, T tokens, K experts per token, H hidden, I expert intermediate, F = 2I, L experts here, W columns of a
row. The order of the rows is int32 `[T * K]`: the place of each (token, k) pair.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_chunk.ops import cpu
from mindspeed_chunk.ops.groups import Groups
from mindspeed_chunk.ops.npu_ops import find

# The documentation's limits on sizes.
_MAX_PAIRS = 2**24 - 2
_MAX_TOP_K = 512
_MAX_GROUPS = 1024
_MAX_WIDTH = 65535
# Larger integers are not exact in fp32.
_MAX_FP32_INTEGER = 2**24


def count(keys: torch.Tensor, num_bins: int) -> torch.Tensor:
    # not bincount, which reads the largest key on the host, nor a scatter, for which each core reads all keys; a bin
    # has the width 1, and integers are sorted into it by division of integers
    return torch.histc(keys.reshape(-1).to(torch.int64), num_bins, 0, num_bins)


def permute(x_TH: torch.Tensor, route_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if route_TK.numel() == 0:
        return x_TH.new_empty((0, x_TH.shape[1])), route_TK.new_empty(0, dtype=torch.int32)
    # an id below 0 is refused later, when the plan is read; the kernel must not see it
    route_TK = route_TK.to(torch.int64).clamp(min=0)
    needs = {
        f"at most {_MAX_PAIRS} rows": route_TK.numel() <= _MAX_PAIRS,
        f"at most {_MAX_TOP_K} experts per token": route_TK.shape[1] <= _MAX_TOP_K,
    }
    op = find("npu_moe_token_permute", x_TH.dtype, needs)
    if op is not None:
        return op(x_TH, route_TK)
    pair_R = _argsort(route_TK.reshape(-1))
    return x_TH.index_select(0, pair_R // route_TK.shape[1]), pairs(pair_R)


def pairs(order_R: torch.Tensor) -> torch.Tensor:
    # the inverse of a permutation: the order that sorts it
    return _argsort(order_R)


def permute_backward(grad_RH: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
    num_tokens = order_R.numel() // top_k
    if num_tokens == 0:
        return grad_RH.new_empty((0, grad_RH.shape[1]))
    op = find("npu_moe_token_permute_grad", grad_RH.dtype)
    if op is None:
        return _by_token(grad_RH, order_R, top_k).sum(1)
    # the op uses only shape and dtype of the tokens and of their ids
    return op(grad_RH[:num_tokens], grad_RH, order_R.view(-1, top_k), order_R)


def unpermute(rows_RH: torch.Tensor, order_R: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    rows_RH = rows_RH.to(weight_TK.dtype)
    if weight_TK.numel() == 0:
        return rows_RH.new_empty((0, rows_RH.shape[1]))
    op = find("npu_moe_token_unpermute", rows_RH.dtype)
    if op is None:
        return _by_token(rows_RH, order_R, weight_TK.shape[1]).mul_(weight_TK[..., None]).sum(1)
    return op(rows_RH, order_R, probs=weight_TK)


# npu_moe_token_unpermute_grad would need the rows
unpermute_backward, rows_of = cpu.unpermute_backward, cpu.rows_of


def rows_of_backward(value_R: torch.Tensor, order_R: torch.Tensor, out_TK: torch.Tensor) -> None:
    out_TK.view(-1).copy_(value_R.index_select(0, order_R))


# npu_moe_re_routing, which is for this, uses as many cores as there are source ranks
def regroup(rows_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
    return rows_RH if groups.in_one_order else rows_RH.index_select(0, groups.to_experts)


def regroup_backward(rows_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
    return rows_RH if groups.in_one_order else rows_RH.index_select(0, groups.to_sources)


def operand(rows_RH: torch.Tensor) -> torch.Tensor:
    return rows_RH.contiguous()


def grouped_mm(
    rows_RH: torch.Tensor, weight_LHF: torch.Tensor, groups: Groups, out: torch.Tensor | None = None
) -> torch.Tensor:
    if len(rows_RH) == 0 or len(weight_LHF) == 1:  # one expert is one matmul, without a list of groups
        return cpu.grouped_mm(rows_RH, weight_LHF, groups, out)
    op = find("npu_grouped_matmul", rows_RH.dtype, _matmul_needs(weight_LHF))
    if op is None:
        return cpu.grouped_mm(rows_RH, weight_LHF, groups, out)
    if not weight_LHF.transpose(1, 2).is_contiguous():  # the op accepts a transposed view, but no other strides
        weight_LHF = weight_LHF.contiguous()
    (product_RF,) = op(
        [rows_RH.contiguous()],
        [weight_LHF],
        group_list=groups.of_experts,
        split_item=3,
        group_type=0,
        group_list_type=1,
    )
    return product_RF if out is None else out.copy_(product_RF)


def grouped_mm_back(
    rows_RH: torch.Tensor, weight_LHF: torch.Tensor, groups: Groups, out: torch.Tensor | None = None
) -> torch.Tensor:
    product_RF = regroup_backward(grouped_mm(rows_RH, weight_LHF, groups), groups)
    return product_RF if out is None else out.copy_(product_RF)


def grouped_mm_wgrad(rows_RH: torch.Tensor, grad_RF: torch.Tensor, groups: Groups, total_LHF: torch.Tensor) -> None:
    if len(rows_RH) == 0:
        return
    if not total_LHF.is_contiguous():  # the other layout: (rows^T grad)^T = grad^T rows
        rows_RH, grad_RF, total_LHF = grad_RF, rows_RH, total_LHF.transpose(1, 2)
    needs = _matmul_needs(total_LHF) | {"a contiguous total": total_LHF.is_contiguous()}
    if total_LHF.dtype == torch.float32 and rows_RH.dtype != torch.float32:
        op = find("npu_grouped_matmul_add_", rows_RH.dtype, needs)
        if op is not None:
            # where the rows of each expert end, not how many there are: every version of the op reads this
            op(total_LHF, rows_RH.contiguous(), grad_RF.contiguous(), groups.long_ends, transpose_x=True)
            return
    elif len(total_LHF) > 1:
        op = find("npu_grouped_matmul", rows_RH.dtype, needs)
        if op is not None:
            total_LHF.add_(_weight_grads(op, rows_RH, grad_RF, groups))
            return
    cpu.grouped_mm_wgrad(rows_RH, grad_RF, groups, total_LHF)


def swiglu(fc1_RF: torch.Tensor, limit: float) -> torch.Tensor:
    op = find("npu_swiglu", fc1_RF.dtype)
    if op is None or len(fc1_RF) == 0:
        return cpu.swiglu(fc1_RF, limit)
    return op(_clamped(fc1_RF, limit), dim=-1)


def swiglu_backward(grad_RI: torch.Tensor, fc1_RF: torch.Tensor, limit: float, *, reuse: bool) -> torch.Tensor:
    op = find("npu_swiglu_backward", fc1_RF.dtype)
    if op is None or len(fc1_RF) == 0:
        return cpu.swiglu_backward(grad_RI, fc1_RF, limit, reuse=reuse)
    grad_RF = op(grad_RI, _clamped(fc1_RF, limit), dim=-1)
    if limit > 0:
        gate_RI, up_RI = fc1_RF.chunk(2, dim=-1)
        grad_gate_RI, grad_up_RI = grad_RF.chunk(2, dim=-1)
        grad_gate_RI.masked_fill_(gate_RI > limit, 0)
        grad_up_RI.masked_fill_(up_RI.abs() > limit, 0)
    return grad_RF


def _by_token(rows_RW: torch.Tensor, order_R: torch.Tensor, top_k: int) -> torch.Tensor:
    return rows_RW.index_select(0, order_R).view(-1, top_k, rows_RW.shape[1])


def _argsort(value_R: torch.Tensor) -> torch.Tensor:
    """The stable order of integers in [0, max(R, 2^24)), int32; integers have no sort except on the AI CPU."""
    if len(value_R) <= _MAX_FP32_INTEGER:
        value_R = value_R.to(torch.float32)
    # one element has no other order, and no sort except on the AI CPU, either
    order_R = value_R.argsort(stable=True) if len(value_R) > 1 else torch.zeros_like(value_R)
    return order_R.to(torch.int32)


def _matmul_needs(matrix_LHF: torch.Tensor) -> dict[str, bool]:
    return {
        f"at most {_MAX_GROUPS} experts": len(matrix_LHF) <= _MAX_GROUPS,
        f"matrices of at most {_MAX_WIDTH} rows and columns": max(matrix_LHF.shape[1:]) <= _MAX_WIDTH,
    }


def _weight_grads(op: Callable, rows_RH: torch.Tensor, grad_RF: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Each expert's rows^T times gradient rows, `[L, H, F]`."""
    (grad_LHF,) = op(
        [rows_RH.contiguous().t()],
        [grad_RF.contiguous()],
        group_list=groups.of_experts,
        split_item=3,
        group_type=2,
        group_list_type=1,
    )
    if 0 in groups.rows_per_expert:  # the documentation does not say that the product of no rows is written
        grad_LHF.masked_fill_((groups.of_experts == 0)[:, None, None], 0)
    return grad_LHF


def _clamped(fc1_RF: torch.Tensor, limit: float) -> torch.Tensor:
    # npu_clipped_swiglu does the same and more, but is documented for inference products, and has no gradient
    if limit <= 0:
        return fc1_RF
    gate_RI, up_RI = fc1_RF.chunk(2, dim=-1)
    return torch.cat((gate_RI.clamp(max=limit), up_RI.clamp(-limit, limit)), dim=-1)
