"""The CUDA back end: all experts in one kernel where torch has one for the operands, and indices made on the device.

What is plain torch in `cpu.py` and waits for nothing is used from there; it says what each function takes and returns.
Nothing here makes the host wait for the device, or the device for figures of the host: what the host has to decide it
decides by the counts it knows, and kernels read `Groups.on_device`. Sums are taken in a fixed order, without atomics
(but for integers).

R rows routed, H hidden, F what a matmul puts out, L experts here.
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
rows_of, rows_of_backward = cpu.rows_of, cpu.rows_of_backward
swiglu, swiglu_backward = cpu.swiglu, cpu.swiglu_backward
# 2.10 has it under a public name; 2.8's raises on all but one kind of device, and 2.7 has none.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or (
    getattr(torch, "_grouped_mm", None) if Version(torch.__version__) >= Version("2.9") else None
)
_ALIGNMENT = 16  # bytes, of rows and of where they start


def count(keys: torch.Tensor, num_bins: int) -> torch.Tensor:
    """See `cpu.count`."""
    keys = keys.reshape(-1)
    # bincount asks the device for the largest key
    counts = torch.zeros(num_bins, dtype=torch.int64, device=keys.device)
    return counts.scatter_add_(0, keys, torch.ones_like(keys))


def regroup(rows_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
    """See `cpu.regroup`."""
    return rows_RH if groups.in_one_order else rows_RH.index_select(0, _transposed(groups.on_device, groups.num_rows))


def regroup_backward(rows_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
    """See `cpu.regroup_backward`."""
    return rows_RH if groups.in_one_order else rows_RH.index_select(0, _back(groups))


def _back(groups: Groups) -> torch.Tensor:
    return _transposed(groups.on_device.t(), groups.num_rows)


def _transposed(counts_AB: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Which row of those in (a, b) order stands where in (b, a) order: int64 `[R]`."""
    counts_BA = counts_AB.t().flatten()
    ends_AB = counts_AB.flatten().cumsum(0).view(counts_AB.shape)
    # a block of rows moves as one piece, by the distance of its ends
    distance_BA = ends_AB.t().flatten() - counts_BA.cumsum(0)
    # without its output's size, repeat_interleave asks the device for it
    distance_R = torch.repeat_interleave(distance_BA, counts_BA, output_size=num_rows)
    return distance_R.add_(torch.arange(num_rows, device=counts_AB.device))


def grouped_mm(
    rows_RH: torch.Tensor, weight_LHF: torch.Tensor, groups: Groups, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `cpu.grouped_mm`. With `out`, the products are in a buffer of their own first."""
    if not _in_one_kernel(rows_RH, weight_LHF, groups):
        return cpu.grouped_mm(rows_RH, weight_LHF, groups, out)
    products_RF = _grouped_mm(rows_RH, weight_LHF, offs=groups.ends)
    return products_RF if out is None else out.copy_(products_RF)


def grouped_mm_back(
    rows_RH: torch.Tensor, weight_LHF: torch.Tensor, groups: Groups, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `cpu.grouped_mm_back`. One kernel for all experts means a second buffer of all rows until they are moved."""
    if groups.in_one_order:
        return grouped_mm(rows_RH, weight_LHF, groups, out)
    if not _in_one_kernel(rows_RH, weight_LHF, groups):
        return cpu.grouped_mm_back(rows_RH, weight_LHF, groups, out)
    return torch.index_select(_grouped_mm(rows_RH, weight_LHF, offs=groups.ends), 0, _back(groups), out=out)


def grouped_mm_wgrad(rows_RH: torch.Tensor, grad_RF: torch.Tensor, groups: Groups, total_LHF: torch.Tensor) -> None:
    """See `cpu.grouped_mm_wgrad`. In one kernel there is a gradient of all experts beside the total for a moment."""
    if total_LHF.stride(1) == 1:  # a transposed total: the transposed product, to be added row by row
        rows_RH, grad_RF, total_LHF = grad_RF, rows_RH, total_LHF.transpose(1, 2)
    if _in_one_kernel(rows_RH.t(), grad_RF, groups):
        total_LHF.add_(_grouped_mm(rows_RH.t(), grad_RF, offs=groups.ends))
    else:
        cpu.grouped_mm_wgrad(rows_RH, grad_RF, groups, total_LHF)


def _in_one_kernel(left: torch.Tensor, right: torch.Tensor, groups: Groups) -> bool:
    """Whether torch's grouped kernel takes these operands, and without a look at the offsets from the host."""
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
    """Decided, and told, once for each kind of operands: any that are refused go through one matmul an expert."""
    reason = _device_refusal(device, left if left == right else None)
    if reason is None and any(n % _ALIGNMENT for n in row_bytes):
        reason = f"rows are not a multiple of {_ALIGNMENT} bytes"
    if reason is None and not starts_fit:
        reason = f"an operand does not start at a multiple of {_ALIGNMENT} bytes"
    if reason is not None:
        widths = " and ".join(map(str, row_bytes[:2]))
        text = f"Chunk MoE: one matmul per expert, not one kernel, for rows of {widths} bytes, {left}: {reason}"
        say_once(logging.INFO, text)
    return reason is None


def _device_refusal(device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Why torch would raise, or fall back to a loop of its own that copies the offsets to the host."""
    if _grouped_mm is None:
        return f"torch {torch.__version__} has no grouped matmul; 2.9 has"
    if device.type != "cuda" or torch.version.cuda is None:
        return "torch's grouped matmul is for NVIDIA devices"
    if dtype != torch.bfloat16:
        return "torch's grouped matmul is for bfloat16"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        return f"torch's grouped matmul is for compute capability 9 and 10, this is {major}.{minor}"
    return None
