"""What differs between devices outside of the kernels: how a small tensor reaches the host."""

from __future__ import annotations

import torch

from mindspeed_chunk.observe import emit


class HostCopy:
    """A tensor on its way to the host. `wait()` returns it there.

    The copy is announced when it starts, because that is what a call costs; a CPU tensor is its own host copy.
    """

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        emit("host_copy", name, elements=tensor.numel())
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor.cpu()
