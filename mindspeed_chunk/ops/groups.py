"""Which rows belong to which expert: the input of every grouped kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Groups:
    """The rows at the experts of one chunk, by source rank and local expert, for Python and for kernels.

    Attributes:
        counts: rows `[S][L]`, S source ranks, L experts here.
        on_device: the same figures as an int64 tensor `[S, L]`, contiguous, for kernels that read them there.
    """

    counts: tuple[tuple[int, ...], ...]
    on_device: torch.Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, counts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Groups:
        """From figures on the host; costs a copy to the device."""
        on_device = torch.tensor(counts, dtype=torch.int64, device=device)
        return cls(tuple(map(tuple, counts)), on_device)

    @functools.cached_property
    def rows_per_expert(self) -> tuple[int, ...]:
        """Their sum over the sources, `[L]`."""
        return tuple(map(sum, zip(*self.counts, strict=True)))

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """Where the rows of each expert end, on the device: int32 `[L]`, made on first use."""
        return self.on_device.sum(0).cumsum(0, dtype=torch.int32)

    @functools.cached_property
    def num_rows(self) -> int:
        return sum(self.rows_per_expert)

    @functools.cached_property
    def in_one_order(self) -> bool:
        """(source, expert) order and (expert, source) order are the same."""
        return len(self.counts) == 1 or len(self.counts[0]) == 1
