"""Random numbers that an activation draws: the backward and a recompute draw the same as the forward.

The backward calls a custom activation again to differentiate it. Dropout in it must get the same mask again, so the
states of torch's generators are kept for each chunk whose activation changed them. If none draws, nothing is kept. The
caller's own generators, passed to torch as `generator=`, are not replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mindspeed_chunk.device import generator_states, set_generator_states


class Draws:
    """The draws of one layer call's activation, by chunk: states of the generators before and after.

    Args:
        device: that of the rows; its generator and the CPU's are compared.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_chunk: dict[int, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}

    @contextmanager
    def of(self, chunk: int) -> Iterator[None]:
        """The chunk's activation runs in this block: for the first time, or in a recompute, which draws the same."""
        if chunk in self._by_chunk:
            with self.again(chunk):
                yield
            self._skip(chunk)
            return
        before = generator_states(self._device)
        yield
        after = generator_states(self._device)
        if not _equal(before, after):
            self._by_chunk[chunk] = before, after

    @contextmanager
    def again(self, chunk: int) -> Iterator[None]:
        """The block draws the same numbers as for the chunk before, and leaves the generators unchanged."""
        if chunk not in self._by_chunk:
            yield
            return
        with generators_untouched(self._device):
            set_generator_states(self._by_chunk[chunk][0], self._device)
            yield

    def skip(self) -> None:
        """In a recompute without the activation: set the generators to their state after the forward."""
        for chunk in self._by_chunk:  # in the order of the draws
            self._skip(chunk)

    def _skip(self, chunk: int) -> None:
        """Move the generators from their state before the chunk's draws to their state after them.

        In any other state they stay: a checkpoint with `preserve_rng_state=False` also draws other numbers around the
        layer.
        """
        before, after = self._by_chunk[chunk]
        if _equal(generator_states(self._device), before):
            set_generator_states(after, self._device)


@contextmanager
def generators_untouched(device: torch.device) -> Iterator[None]:
    """After the block, the generators are in the same state as before, whatever it draws."""
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states, device)


def _equal(states: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    return all(map(torch.equal, states, others))
