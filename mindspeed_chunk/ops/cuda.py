"""The CUDA back end: all experts in one kernel if torch has one for the operands, and indices made on the device.

Functions of `cpu.py` that are plain torch and do not wait are used from there; it documents arguments and results.
Nothing here makes the host wait for the device, or the device for figures of the host. The host decides by the counts
that it has, and kernels read `Groups` on the device. Sums have a fixed order, without atomics (except for integers).

R rows routed, H hidden, F output columns of a matmul, L experts here.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version

from mindspeed_chunk.log import say_once
from mindspeed_chunk.ops import cpu
from mindspeed_chunk.ops.groups import Groups

permute, permute_backward = cpu.permute, cpu.permute_backward
unpermute, unpermute_backward = cpu.unpermute, cpu.unpermute_backward
pairs, rows_of, rows_of_backward = cpu.pairs, cpu.rows_of, cpu.rows_of_backward
operand = cpu.operand
swiglu, swiglu_backward = cpu.swiglu, cpu.swiglu_backward

# 2.10 has it under a public name; 2.8's raises on all devices except one kind, and 2.7 has none.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or (
    getattr(torch, "_grouped_mm", None) if Version(torch.__version__) >= Version("2.9") else None
)
_ALIGNMENT = 16  # bytes, of rows and of where they start


def count(keys: torch.Tensor, num_bins: int) -> torch.Tensor:
    """See `cpu.count`."""
    keys = keys.reshape(-1)
    # bincount would read the largest key from the device
    counts = torch.zeros(num_bins, dtype=torch.int64, device=keys.device)
    return counts.scatter_add_(0, keys, torch.ones_like(keys))


def regroup(rows_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
    """See `cpu.regroup`."""
    return rows_RH if groups.in_one_order else rows_RH.index_select(0, groups.to_experts)


def regroup_backward(rows_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
    """See `cpu.regroup_backward`."""
    return rows_RH if groups.in_one_order else rows_RH.index_select(0, groups.to_sources)


def grouped_mm(
    rows_RH: torch.Tensor, weight_LHF: torch.Tensor, groups: Groups, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `cpu.grouped_mm`. With `out`, the products are first in a separate buffer."""
    if not _in_one_kernel(rows_RH, weight_LHF, groups):
        return cpu.grouped_mm(rows_RH, weight_LHF, groups, out)
    products_RF = _grouped_mm(rows_RH, weight_LHF, offs=groups.ends)
    return products_RF if out is None else out.copy_(products_RF)


def grouped_mm_back(
    rows_RH: torch.Tensor, weight_LHF: torch.Tensor, groups: Groups, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `cpu.grouped_mm_back`. One kernel for all experts needs a second buffer of all rows until they are moved."""
    if groups.in_one_order:
        return grouped_mm(rows_RH, weight_LHF, groups, out)
    if not _in_one_kernel(rows_RH, weight_LHF, groups):
        return cpu.grouped_mm_back(rows_RH, weight_LHF, groups, out)
    return torch.index_select(_grouped_mm(rows_RH, weight_LHF, offs=groups.ends), 0, groups.to_sources, out=out)


def grouped_mm_wgrad(rows_RH: torch.Tensor, grad_RF: torch.Tensor, groups: Groups, total_LHF: torch.Tensor) -> None:
    """See `cpu.grouped_mm_wgrad`. One kernel needs a gradient of all experts in addition to the total for a moment."""
    if total_LHF.stride(1) == 1:  # a transposed total: compute the transposed product, which can be added row by row
        rows_RH, grad_RF, total_LHF = grad_RF, rows_RH, total_LHF.transpose(1, 2)
    if _in_one_kernel(rows_RH.t(), grad_RF, groups):
        total_LHF.add_(_grouped_mm(rows_RH.t(), grad_RF, offs=groups.ends))
    else:
        cpu.grouped_mm_wgrad(rows_RH, grad_RF, groups, total_LHF)


def _in_one_kernel(left: torch.Tensor, right: torch.Tensor, groups: Groups) -> bool:
    """Whether torch's grouped kernel supports these operands without reading the offsets on the host."""
    if groups.num_rows == 0:
        return False
    row_bytes = [max(operand.stride()[-2:]) * operand.element_size() for operand in (left, right)]
    row_bytes.append(right.shape[-1] * right.element_size())  # of the result
    starts_fit = all(operand.data_ptr() % _ALIGNMENT == 0 for operand in (left, right))
    return _takes(left.device, left.dtype, right.dtype, tuple(row_bytes), starts_fit)


@functools.cache
def _takes(
    device: torch.device, left: torch.dtype, right: torch.dtype, row_bytes: tuple[int, ...], starts_fit: bool
) -> bool:
    """Decided and logged once per kind of operands. Operands that are refused use one matmul per expert."""
    reason = _device_refusal(device, left if left == right else None)
    if reason is None and any(n % _ALIGNMENT for n in row_bytes):
        reason = f"rows are not a multiple of {_ALIGNMENT} bytes"
    if reason is None and not starts_fit:
        reason = f"an operand does not start at a multiple of {_ALIGNMENT} bytes"
    if reason is not None:
        widths = " and ".join(map(str, row_bytes[:2]))
        text = f"Chunk MoE: one matmul per expert instead of one kernel, for rows of {widths} bytes, {left}: {reason}"
        say_once(logging.INFO, text)
    return reason is None


def _device_refusal(device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Why torch would raise, or fall back to its own loop, which copies the offsets to the host."""
    if _grouped_mm is None:
        return f"torch {torch.__version__} has no grouped matmul; 2.9 has one"
    if device.type != "cuda" or torch.version.cuda is None:
        return "torch's grouped matmul is for NVIDIA devices"
    if dtype != torch.bfloat16:
        return "torch's grouped matmul is for bfloat16"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        return f"torch's grouped matmul is for compute capability 9 and 10, this device has {major}.{minor}"
    return None
