"""The differences between devices outside the kernels: copies to the host and back that run during the computation.

Accelerators are used through `torch.get_device_module` (torch.cuda, torch.npu). Nothing here is stored per thread,
because their backward runs in another thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

import torch

from mindspeed_chunk.dist import DONE, Work
from mindspeed_chunk.observe import emit

# A decorator: torch.compile traces neither the function nor what it calls. Not torch.compiler.disable, which imports
# torch._dynamo immediately: that takes a second. Here it happens in the first call.
untraced = torch._disable_dynamo
_LAUNCHES = 100


def accelerator(device: torch.device) -> ModuleType | None:
    """The module with the streams of a device, or None for the CPU, which has none."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def launch_seconds(device: torch.device) -> float:
    """Seconds that the host needs to launch one small operation ahead of the device; 0 on a CPU, which is not ahead."""
    streams = accelerator(device)
    if streams is None:
        return 0.0
    x = torch.zeros(1, device=device)
    for _ in range(2):  # the first time also loads the kernel
        streams.synchronize(device)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            x.add_(1)
        took = time.perf_counter() - start
    return took / _LAUNCHES


def generator_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """States of torch's default generators that code on the device may use: the CPU's, then the device's own.

    They are on the host, also for an accelerator: its state is a seed and an offset.
    """
    own = accelerator(device)
    return (torch.get_rng_state(),) if own is None else (torch.get_rng_state(), own.get_rng_state(device))


def set_generator_states(states: tuple[torch.Tensor, ...], device: torch.device) -> None:
    """Set the states that `generator_states` returned."""
    torch.set_rng_state(states[0])
    own = accelerator(device)
    if own is not None:
        own.set_rng_state(states[1], device)


def host_buffer(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor on the host, pinned if it is for copies to and from an accelerator."""
    return torch.empty(shape, dtype=dtype, pin_memory=accelerator(device) is not None)


class Copy:
    """A copy on a side stream."""

    def __init__(self, streams: ModuleType, device: torch.device, event: Any) -> None:
        self._streams, self._device, self._event = streams, device, event

    def wait(self) -> None:
        """Everything queued from now on runs after the copy."""
        self._streams.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Block the host until the copy is done; other queued work continues."""
        self._event.synchronize()


class CopyLane:
    """Copies between host and device during the computation: on a side stream, or immediately if there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = accelerator(device)
        self._stream: Any = None if self._streams is None else self._streams.Stream(device)

    @torch.no_grad()
    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Work = DONE) -> Work:
        """Start `target.copy_(source)` after `after` and after all queued work; only the copy waits for these.

        Both tensors, and the data that `after` reads, must exist until the wait for the copy: for the allocator they
        belong to the stream on which they were made. They are kept, not marked with `record_stream`. With that the
        moment at which their memory can be used again would be random.
        """
        if self._streams is None:
            after.wait()
            target.copy_(source)
            return DONE
        self._stream.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._stream):
            after.wait()  # makes the current stream wait, which is this lane's stream
            target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        return Copy(self._streams, self.device, event)


@functools.cache
def _lane(device: torch.device) -> CopyLane:
    """For small copies that the host waits for. Large copies have separate lanes, so that they do not delay these."""
    return CopyLane(device)


class HostCopy:
    """A copy of a tensor to the host that starts when `after` is done. `wait()` returns the tensor on the host.

    On an accelerator the copy is queued immediately, on a side stream, and `wait()` waits only for it: kernels that are
    queued later continue. The data that `after` reads must exist until then. A CPU tensor is its own host copy. The
    event is emitted by `wait()`, because the wait is the cost of a call.
    """

    def __init__(self, tensor: torch.Tensor, name: str, after: Work = DONE) -> None:
        self._tensor, self._name, self._after = tensor, name, after
        self._host: torch.Tensor | None = None
        if accelerator(tensor.device) is not None:
            self._host = host_buffer(tensor.shape, tensor.dtype, tensor.device)
            self._copy = cast(Copy, _lane(tensor.device).copy(self._host, tensor, after))

    def wait(self) -> torch.Tensor:
        emit("host_copy", self._name, elements=self._tensor.numel())
        if self._host is None:
            self._after.wait()
            return self._tensor
        self._copy.synchronize()
        return self._host
