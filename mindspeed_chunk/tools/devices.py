"""The devices that `bench` and `trace` run on: how a rank uses one, waits for it, and counts its memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_chunk import device
from mindspeed_chunk.tools.measure import LiveBytes

# the library of a device's collectives
COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def missing(kind: str) -> str | None:
    """Why there is no device of this kind here, or None if there is one."""
    try:
        return None if count(kind) else f"torch {torch.__version__} sees no {kind} device here"
    except Exception as error:
        package = "torch_npu" if kind == "npu" else f"torch.{kind}"
        return f"{package} cannot be imported: {' '.join(str(error).split())}"


def count(kind: str) -> int:
    """Visible devices; on a CPU the ranks of a run that does not say how many."""
    return 2 if kind == "cpu" else _module(kind).device_count()


def here(kind: str) -> torch.device:
    """The device of this rank."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, _module(kind).current_device())


def name(kind: str) -> str:
    return "cpu" if kind == "cpu" else _module(kind).get_device_name()


def memory_bytes(kind: str) -> int:
    """Of this rank's device, which is not a CPU."""
    return _module(kind).get_device_properties(_module(kind).current_device()).total_memory


def join(kind: str, number: int) -> None:
    """Use the device of this number, and make the process group of all ranks. CPU tensors always travel over gloo."""
    backend = COLLECTIVES[kind]
    if kind != "cpu":
        _module(kind).set_device(number)
        backend = f"cpu:gloo,{kind}:{backend}"
    dist.init_process_group(backend)


def barrier() -> None:
    """Without the device: that of a device's library waits on the device."""
    dist.all_reduce(torch.zeros(1))


def synchronize(place: torch.device) -> None:
    streams: Any = device.accelerator(place)
    if streams is not None:
        streams.synchronize()


def memory(place: torch.device) -> LiveBytes | AllocatedBytes:
    """A context that counts the bytes of what is made in it: `now`, and `peak`, which may be set to `now`."""
    streams = device.accelerator(place)
    return LiveBytes() if streams is None else AllocatedBytes(streams, place)


class AllocatedBytes:
    """`LiveBytes` by the allocator of a device."""

    def __init__(self, streams: Any, place: torch.device) -> None:
        self._streams, self._place = streams, place

    def __enter__(self) -> AllocatedBytes:
        self._before = self._streams.memory_allocated(self._place)
        self.peak = 0
        return self

    def __exit__(self, *_: object) -> None: ...

    @property
    def now(self) -> int:
        return self._streams.memory_allocated(self._place) - self._before

    @property
    def peak(self) -> int:
        return self._streams.max_memory_allocated(self._place) - self._before

    @peak.setter
    def peak(self, _: int) -> None:
        self._streams.reset_peak_memory_stats(self._place)


def _module(kind: str) -> ModuleType | Any:
    """torch.cuda, or torch.npu, which torch has once torch_npu is imported."""
    if kind == "npu":
        import torch_npu  # noqa: F401
    return torch.get_device_module(kind)
