"""Which rows belong to which expert: the input of every grouped kernel.

N chunks, S source ranks, L experts here, R rows of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


class RowCounts:
    """The rows at the experts for all chunks of a call, on the device, for kernels.

    What they read of it is made on first use, for all chunks at once: with a kernel for each chunk, the host would need
    more time than the device. Sums are int32, because NPUs have no cumulative sum in int64, except on their AI CPU.

    Args:
        rows_NSL: int64, contiguous.
    """

    def __init__(self, rows_NSL: torch.Tensor) -> None:
        self.rows_NSL = rows_NSL

    @functools.cached_property
    def of_experts_NL(self) -> torch.Tensor:
        """int64."""
        return self.rows_NSL.sum(1)

    @functools.cached_property
    def ends_NL(self) -> torch.Tensor:
        """Where the rows of each expert end; int32."""
        return self.of_experts_NL.cumsum(1, dtype=torch.int32)

    @functools.cached_property
    def long_ends_NL(self) -> torch.Tensor:
        """The same in int64."""
        return self.ends_NL.to(torch.int64)

    @functools.cached_property
    def _moves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of each block, and how far it moves, `[2, N, S * L]`: in (expert, source) order, then the reverse."""
        N, S, L = self.rows_NSL.shape
        rows_2NB = torch.stack((self.rows_NSL.transpose(1, 2).flatten(1), self.rows_NSL.flatten(1)))
        ends_2NB = rows_2NB.cumsum(2, dtype=torch.int32)
        # a block of rows moves as one piece, by the distance of its ends
        moves_NLS = ends_2NB[1].view(N, S, L).transpose(1, 2) - ends_2NB[0].view(N, L, S)
        moves_2NB = torch.stack((moves_NLS.flatten(1), moves_NLS.neg().transpose(1, 2).flatten(1)))
        # `orders` counts places through all chunks
        total_N1 = ends_2NB[0, :, -1:]
        return rows_2NB, moves_2NB - (total_N1.cumsum(0, dtype=torch.int32) - total_N1)

    def orders(self, rows_N: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """For each chunk `[2, R]`, int32: see `Groups.to_experts` and `Groups.to_sources`.

        Args:
            rows_N: R of each chunk.
        """
        total = sum(rows_N)
        if total == 0:  # an NPU would read the size of the result from the device
            return tuple(self.rows_NSL.new_empty((2, 0), dtype=torch.int32) for _ in rows_N)
        rows_2NB, moves_2NB = self._moves
        place_2R = torch.repeat_interleave(moves_2NB.flatten(), rows_2NB.flatten(), output_size=2 * total).view(2, -1)
        place_2R += torch.arange(total, dtype=torch.int32, device=place_2R.device)
        return place_2R.split(tuple(rows_N), dim=1)


class _Orders:
    """The orders of one direction of a call: made on first use, and freed with the direction."""

    def __init__(self, on_device: RowCounts, rows_N: Sequence[int]) -> None:
        self._on_device, self._rows_N = on_device, rows_N

    @functools.cached_property
    def of_chunks(self) -> tuple[torch.Tensor, ...]:
        return self._on_device.orders(self._rows_N)


@dataclass(frozen=True)
class Groups:
    """The rows at the experts of one chunk, by source rank and local expert, for Python and for kernels.

    Attributes:
        counts: rows `[S][L]`.
    """

    counts: tuple[tuple[int, ...], ...]
    _chunk: int = field(compare=False, repr=False)
    _on_device: RowCounts = field(compare=False, repr=False)
    _orders: _Orders = field(compare=False, repr=False)

    @classmethod
    def of(cls, counts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Groups:
        """From figures on the host; costs a copy to the device."""
        return cls.of_chunks([counts], torch.tensor([counts], dtype=torch.int64, device=device))[0]

    @classmethod
    def of_chunks(cls, counts_NSL: Sequence[Sequence[Sequence[int]]], rows_NSL: torch.Tensor) -> tuple[Groups, ...]:
        """Those of all chunks of a call; the same figures on the host and on the device, see `RowCounts`."""
        on_device = RowCounts(rows_NSL)
        orders = _Orders(on_device, [sum(map(sum, counts)) for counts in counts_NSL])
        return tuple(
            cls(tuple(map(tuple, counts)), chunk, on_device, orders) for chunk, counts in enumerate(counts_NSL)
        )

    @staticmethod
    def for_direction(groups_N: Sequence[Groups]) -> tuple[Groups, ...]:
        """The same, without the orders: those that a direction makes are freed with the result."""
        orders = _Orders(groups_N[0]._on_device, [groups.num_rows for groups in groups_N])
        return tuple(dataclasses.replace(groups, _orders=orders) for groups in groups_N)

    @property
    def on_device(self) -> torch.Tensor:
        """The rows, int64 `[S, L]`."""
        return self._on_device.rows_NSL[self._chunk]

    @property
    def of_experts(self) -> torch.Tensor:
        """`rows_per_expert` on the device, int64 `[L]`."""
        return self._on_device.of_experts_NL[self._chunk]

    @property
    def ends(self) -> torch.Tensor:
        """Where the rows of each expert end, on the device: int32 `[L]`."""
        return self._on_device.ends_NL[self._chunk]

    @property
    def long_ends(self) -> torch.Tensor:
        """The same in int64."""
        return self._on_device.long_ends_NL[self._chunk]

    @property
    def to_experts(self) -> torch.Tensor:
        """For each place in (expert, source) order, the place of its row in (source, expert) order: int32 `[R]`."""
        return self._orders.of_chunks[self._chunk][0]

    @property
    def to_sources(self) -> torch.Tensor:
        """The reverse."""
        return self._orders.of_chunks[self._chunk][1]

    @functools.cached_property
    def rows_per_expert(self) -> tuple[int, ...]:
        """Their sum over the sources, `[L]`."""
        return tuple(map(sum, zip(*self.counts, strict=True)))

    @functools.cached_property
    def num_rows(self) -> int:
        return sum(self.rows_per_expert)

    @functools.cached_property
    def in_one_order(self) -> bool:
        """(source, expert) order and (expert, source) order are the same."""
        return len(self.counts) == 1 or len(self.counts[0]) == 1
