"""What differs between devices outside of the kernels: how tensors get to the host and back."""

from __future__ import annotations

import torch

from mindspeed_chunk.dist import DONE, Work
from mindspeed_chunk.observe import emit


class HostCopy:
    """A tensor on its way to the host, once `after` is done. `wait()` returns it there.

    It is announced when it is waited for, because that is what a call costs; a CPU tensor is its own host copy.
    """

    def __init__(self, tensor: torch.Tensor, name: str, after: Work = DONE) -> None:
        self._tensor, self._name, self._after = tensor, name, after

    def wait(self) -> torch.Tensor:
        emit("host_copy", self._name, elements=self._tensor.numel())
        self._after.wait()
        return self._tensor.cpu()


class CopyLane:
    """Copies between host and device beside the computation: on a side stream, or at once where there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._streams is None else self._streams.Stream(device)

    @torch.no_grad()
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Work:
        """Start `target.copy_(source)` behind what is queued now. Both must stay until that is waited for."""
        if self._stream is None:
            target.copy_(source)
            return DONE
        self._stream.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return _Recorded(self._streams, self._stream.record_event())


class _Recorded:
    """Lets the stream that waits for it wait for an event."""

    def __init__(self, streams, event) -> None:
        self._streams, self._event = streams, event

    def wait(self) -> None:
        self._streams.current_stream().wait_event(self._event)
