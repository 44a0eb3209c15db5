"""What MindSpeed-MM lacks on a CPU, so that its trainer runs there unchanged.

The host needs an NPU or CUDA. Everything here is either a name in one of the host's modules, or an extension of a torch
function to arguments for which torch itself raises an error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspeed_chunk.log import say
from mindspeed_chunk.patches import settings
from mindspeed_chunk.patches.record import Drifted, Patch, Undo

_DEVICE_MODULE = "mindspeed_mm.fsdp.utils.device"
_HELPERS = ("create_stream", "create_event", "get_current_stream", "switch_to_specified_stream")


class _Stream:
    """Work on a CPU is done when the call returns: there is nothing to wait for."""

    def wait_event(self, event: object) -> None:
        pass

    wait_stream = wait_event

    def synchronize(self) -> None:
        pass

    def record_event(self, event: object = None) -> object:
        return _Event() if event is None else event


class _Event:
    def record(self, stream: object = None) -> None:
        pass

    wait = record

    def synchronize(self) -> None:
        pass


def apply_device(module: ModuleType) -> Undo:
    """The helpers of the host's device module, before others bind their names, and three torch functions."""
    import torch
    import torch.distributed as dist

    wanted = (*_HELPERS, "get_dist_comm_backend", "set_accelerator_compatible", "reset_peak_memory_stats")
    missing = [name for name in wanted if not hasattr(module, name)]
    if missing:
        raise Drifted(f"no {', '.join(missing)}")
    stream = _Stream()
    changes = _Changes()
    # on a machine that has an accelerator too; the host's own tests of these then come out as "cpu"
    changes.set(module, "IS_CUDA_AVAILABLE", False)
    changes.set(module, "IS_NPU_AVAILABLE", False)
    changes.set(module, "create_stream", lambda *args, **kwargs: stream)
    changes.set(module, "get_current_stream", lambda: stream)
    changes.set(module, "create_event", lambda *args, **kwargs: _Event())
    changes.set(module, "switch_to_specified_stream", contextlib.nullcontext)
    changes.set(module, "get_dist_comm_backend", lambda cpu=False: "gloo")
    changes.set(module, "empty_cache", lambda: None)
    changes.set(module, "reset_peak_memory_stats", lambda: None)
    changes.set(module, "set_accelerator_compatible", _accelerator(module.set_accelerator_compatible, changes))
    changes.set(torch, "histc", _integer_histc(torch.histc))
    changes.set(dist, "all_gather_into_tensor", _flat_all_gather(dist.all_gather_into_tensor))
    changes.set(dist, "init_process_group", _init_without_device(dist.init_process_group))

    def undo() -> None:
        changes.undo()
        sys.modules["torch.accelerator"] = torch.accelerator

    return undo


def apply_host_memory(module: ModuleType) -> Undo:
    """The module's own view of torch: its host buffers are pinned, which needs an accelerator."""
    changes = _Changes()
    changes.set(module, "torch", _UnpinnedTorch(module.torch))
    return changes.undo


class _Changes:
    """Attributes set, and the way back."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def keep(self, owner: object, name: str) -> None:
        self._before.append((owner, name, getattr(owner, name)))

    def set(self, owner: object, name: str, value: object) -> None:
        self.keep(owner, name)
        setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)
        self._before.clear()


class _UnpinnedTorch(ModuleType):
    def __init__(self, torch: ModuleType) -> None:
        super().__init__(torch.__name__)
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return self._torch.empty(*args, **kwargs)


def _accelerator(original: Callable, changes: _Changes) -> Callable:
    """The host puts a copy of `torch.accelerator` in its place; that copy then answers for the CPU."""

    @functools.wraps(original)
    def set_accelerator_compatible(fallback_module: Any = None) -> None:
        import torch

        changes.keep(torch, "accelerator")
        original(fallback_module)
        copied: Any = torch.accelerator
        copied.set_device_index = copied.set_device_idx = lambda index: None
        copied.current_device_index = lambda: "cpu"  # given to `device=` by the host
        copied.manual_seed = copied.manual_seed_all = torch.manual_seed
        copied.synchronize = lambda *args: None
        copied.empty_cache = lambda: None

    return set_accelerator_compatible


def _integer_histc(original: Callable) -> Callable:
    """Counts of integers on the CPU, where torch knows floating point only."""

    @functools.wraps(original)
    def histc(input: Any, bins: int = 100, min: float = 0, max: float = 0, **kwargs: Any) -> Any:
        # as the host calls it: ids from 0 to below `bins`, one bin an id
        if input.device.type == "cpu" and not input.is_floating_point() and (min, max) == (0, bins):
            return input.reshape(-1).bincount(minlength=bins)[:bins]
        return original(input, bins=bins, min=min, max=max, **kwargs)

    return histc


def _flat_all_gather(original: Callable) -> Callable:
    """gloo takes a flat output only, NCCL and HCCL take `[ranks, ...]` too."""

    @functools.wraps(original)
    def all_gather_into_tensor(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if output_tensor.device.type == "cpu":
            output_tensor, input_tensor = output_tensor.view(-1), input_tensor.contiguous().view(-1)
        return original(output_tensor, input_tensor, group=group, async_op=async_op)

    return all_gather_into_tensor


def _init_without_device(original: Callable) -> Callable:
    """`device_id` must be an accelerator's; the host always gives one."""

    @functools.wraps(original)
    def init_process_group(*args: Any, device_id: Any = None, **kwargs: Any) -> Any:
        if device_id is not None and device_id.type == "cpu":
            say(logging.INFO, f"MindSpeed-MM runs on the CPU, since {settings.DEVICE}=cpu")
        elif device_id is not None:
            kwargs["device_id"] = device_id
        return original(*args, **kwargs)

    return init_process_group


_WHY = "the host runs on an NPU or with CUDA only"
_UNTIL = "the host runs on a CPU"
PATCHES: tuple[Patch, ...] = (
    Patch(
        name="CPU device",
        module=_DEVICE_MODULE,
        target="the device helpers; torch.histc, all_gather_into_tensor, init_process_group",
        hosts="26.1.0, master of 2026-08",
        expects=f"{', '.join(_HELPERS)}, get_dist_comm_backend, set_accelerator_compatible, reset_peak_memory_stats",
        why=_WHY,
        until=_UNTIL,
        apply=apply_device,
    ),
    *(
        Patch(
            name=name,
            module=f"mindspeed_mm.fsdp.features.memory.{module}",
            target="torch",
            hosts="26.1.0, master of 2026-08",
            expects="host buffers made by torch.empty(..., pin_memory=True)",
            why=_WHY,
            until=_UNTIL,
            apply=apply_host_memory,
        )
        for name, module in (("CPU offload", "async_offload"), ("CPU gradient offload", "grad_offload"))
    ),
)
