"""Random numbers that an activation draws: in the backward, and in a recompute, those of its forward.

The backward calls a custom activation again to differentiate it. Dropout in there must find its mask again, so the
states of torch's generators are kept for each chunk whose activation was seen to draw. Where none draws, nothing is
kept. Generators of the caller, passed to torch as `generator=`, are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mindspeed_chunk.device import generator_states, set_generator_states


class Draws:
    """What the activation of one layer call drew, by chunk: states of the generators before and after.

    Args:
        device: that of the rows; its generator is watched, and the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_chunk: dict[int, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}

    @contextmanager
    def of(self, chunk: int) -> Iterator[None]:
        """The chunk's activation runs in this block: for the first time, or in a recompute, where it draws the same."""
        if chunk in self._by_chunk:
            with self.again(chunk):
                yield
            self._pass_over(chunk)
            return
        before = generator_states(self._device)
        yield
        after = generator_states(self._device)
        if not _equal(before, after):
            self._by_chunk[chunk] = before, after

    @contextmanager
    def again(self, chunk: int) -> Iterator[None]:
        """The block draws what was drawn for the chunk, and leaves the generators as they are."""
        if chunk not in self._by_chunk:
            yield
            return
        with generators_untouched(self._device):
            set_generator_states(self._by_chunk[chunk][0], self._device)
            yield

    def pass_over(self) -> None:
        """In a recompute without the activation: leave the generators where its forward left them."""
        for chunk in self._by_chunk:  # in the order of the draws
            self._pass_over(chunk)

    def _pass_over(self, chunk: int) -> None:
        """From where the generators were before the chunk's draws to where they were behind them.

        Elsewhere they stay: a checkpoint with `preserve_rng_state=False` draws other numbers around the layer, too.
        """
        before, after = self._by_chunk[chunk]
        if _equal(generator_states(self._device), before):
            set_generator_states(after, self._device)


@contextmanager
def generators_untouched(device: torch.device) -> Iterator[None]:
    """Whatever the block draws, the generators are then where they were."""
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states, device)


def _equal(states: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    return all(map(torch.equal, states, others))
