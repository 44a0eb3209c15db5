"""Rows with one number each: H columns, then a 16-byte tail whose first bytes are the number, in its own dtype.

In the backward the router weight is sent with its gradient row, and the weight's gradient returns with the row's
gradient. The tail starts and ends at a multiple of 16 bytes, so every row is aligned for the kernels that need it.
"""

from __future__ import annotations

import torch

_ALIGNMENT = 16  # bytes


def packed_width(hidden: int, dtype: torch.dtype) -> int:
    """Columns of `dtype` in a packed row of `hidden` columns."""
    return (_tail_start(hidden, dtype) + _ALIGNMENT) // dtype.itemsize


def tail(packed_RW: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of the packed rows, a view `[R]` of `dtype`."""
    return packed_RW.view(dtype)[:, _tail_start(hidden, packed_RW.dtype) // dtype.itemsize]


def _tail_start(hidden: int, dtype: torch.dtype) -> int:
    return -(-hidden * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
