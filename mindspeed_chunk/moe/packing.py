"""Rows with one number each: H columns, then a 16-byte tail whose first bytes are the number, in its own dtype.

In the backward the router weight is sent with its gradient row, and the weight's gradient returns with the row's
gradient. The tail starts and ends at a multiple of 16 bytes, so every row is aligned for the kernels that need it.
The planner uses the same width, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 16  # bytes


def packed_bytes(hidden: int, element_size: int) -> int:
    """Bytes of a packed row of `hidden` columns of `element_size` bytes."""
    return _tail_start(hidden, element_size) + _ALIGNMENT


def packed_width(hidden: int, dtype: torch.dtype) -> int:
    """Columns of `dtype` in a packed row of `hidden` columns."""
    return packed_bytes(hidden, dtype.itemsize) // dtype.itemsize


def pack(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Packed rows `[T, W]` of `dtype` with the columns of `parts`, side by side; their tails are not written."""
    hidden = sum(part.shape[1] for part in parts)
    packed_TW = parts[0].new_empty((len(parts[0]), packed_width(hidden, dtype)), dtype=dtype)
    start = 0
    for part in parts:
        packed_TW[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    return packed_TW


def packed_weight(packed_RW: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of the packed rows, a view `[R]` of `dtype`."""
    return packed_RW.view(dtype)[:, _tail_start(hidden, packed_RW.element_size()) // dtype.itemsize]


def _tail_start(hidden: int, element_size: int) -> int:
    return -(-hidden * element_size // _ALIGNMENT) * _ALIGNMENT
