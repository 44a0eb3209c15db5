"""Packed rows: columns of one dtype, then arrays of numbers, each in its own dtype.

In the backward of a dispatch per expert, the router weight is sent with its gradient row, and the weight's gradient
returns with the row's gradient. A dispatch per rank sends with each token its expert ids and router weights. Each
array starts and ends at a multiple of 16 bytes, so every row is aligned for the kernels that need it. The planner uses
the same widths, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 16  # bytes


def packed_bytes(columns: int, element_size: int, arrays: Sequence[int]) -> int:
    """Bytes of a packed row.

    Args:
        columns, element_size: number of columns, and bytes of each.
        arrays: the bytes of each array of numbers.
    """
    return _aligned(columns * element_size) + sum(map(_aligned, arrays))


@dataclass(frozen=True)
class Packing:
    """The format of packed rows.

    Attributes:
        columns, dtype: of the rows themselves.
        arrays: the count and the dtype of each array of numbers; none: rows are not longer than their columns.
    """

    columns: int
    dtype: torch.dtype
    arrays: tuple[tuple[int, torch.dtype], ...] = ()

    @property
    def width(self) -> int:
        """W, a row's length in elements of its dtype."""
        if not self.arrays:
            return self.columns
        return self._start(len(self.arrays)) // self.dtype.itemsize

    def empty(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """`[rows, W]`, not written, on the device of `like`."""
        return like.new_empty((rows, self.width), dtype=self.dtype)

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """`[R, W]` with the columns of `parts`, `[R, *]`, side by side. The arrays are not written."""
        if len(parts) == 1 and not self.arrays:
            return parts[0].to(self.dtype).contiguous()
        packed_RW, start = self.empty(len(parts[0]), parts[0]), 0
        for part in parts:
            packed_RW[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return packed_RW

    def array(self, packed_RW: torch.Tensor, number: int) -> torch.Tensor:
        """One array of the packed rows, a view `[R, count]` of its dtype."""
        count, dtype = self.arrays[number]
        start = self._start(number) // dtype.itemsize
        return packed_RW.view(dtype)[:, start : start + count]

    def _start(self, number: int) -> int:
        before = [count * dtype.itemsize for count, dtype in self.arrays[:number]]
        return packed_bytes(self.columns, self.dtype.itemsize, before)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
