"""Keeps activations on the host: sent while the next micro-chunk computes, and fetched one micro-chunk ahead.

The tensors that autograd saves inside one call of a wrapped block are a group. The backward needs the groups in the
reverse order of the forward. A group is sent when the next one starts, so the last one of a pass, which the backward
needs first, is never sent.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mindspeed_chunk.device import CopyLane, host_buffer, untraced
from mindspeed_chunk.dist import DONE, Work
from mindspeed_chunk.observe import emit

# A copy this small costs more than the memory it frees.
_LEAST_BYTES = 1024


class HostPool:
    """Host buffers by size, pinned if the device is an accelerator, and reused."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A buffer of at least `nbytes` bytes, uint8. The caller owns it until `give`."""
        # torch's allocator of pinned memory rounds up to a power of two and gives nothing back: any other sizes would
        # hold as much, and could not be reused when the sequence length changes
        size = 1 << (nbytes - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        return host_buffer(size, torch.uint8, device)

    def give(self, buffer: torch.Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


class ActivationOffload:
    """Offloads the tensors that are saved inside the calls that it wraps.

    These stay on the device: parameters and buffers, small tensors, and the arguments of the block, which its caller
    holds anyway. But the first tensor, the hidden states, is offloaded if it owns its storage (in a micro-chunk it
    does).
    """

    def __init__(self) -> None:
        self.pool = HostPool()
        self._lane: CopyLane | None = None
        self._last: Callable[[], _SavedByCall | None] = lambda: None

    def wrap(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """The module's forward, which offloads the tensors that it saves."""
        forward = module.forward

        @untraced
        @functools.wraps(forward)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            with (
                self._saved_by_call(name, module, tensors) as group,
                torch.autograd.graph.saved_tensors_hooks(group.pack, _unpack),
            ):
                return forward(*args, **kwargs)

        return offloaded

    def _saved_by_call(self, name: str, module: nn.Module, arguments: list[torch.Tensor]) -> _SavedByCall:
        if self._lane is None and arguments:
            self._lane = CopyLane(arguments[0].device)
        return _SavedByCall(self, name, module, arguments)


class _SavedByCall:
    """The tensors that one call saved. The graph owns them; they are freed with it."""

    def __init__(self, offload: ActivationOffload, name: str, module: nn.Module, arguments: list[torch.Tensor]) -> None:
        self.offload, self.name, self._module = offload, name, module
        self.saved: list[weakref.ref[_SavedTensor]] = []
        self._same: dict[tuple, weakref.ref[_SavedTensor]] = {}
        self._weights: set[int] | None = None
        self.before: Callable[[], _SavedByCall | None] = offload._last
        self._kept = {_storage(tensor) for tensor in arguments[1:]}
        if arguments and arguments[0].untyped_storage().nbytes() != arguments[0].nbytes:
            self._kept.add(_storage(arguments[0]))  # a part of a larger tensor, which stays

    def __enter__(self) -> _SavedByCall:
        before = self.before()
        if before is not None:
            before.send()
        return self

    def __exit__(self, *exception: object) -> None:
        # the copy started with this group, so it had all this time
        before = self.before()
        if before is not None:
            before.release()
        self._same.clear()
        self._kept.clear()
        self._weights = None
        if self.saved:
            self.offload._last = weakref.ref(self)

    @untraced
    def pack(self, tensor: torch.Tensor) -> _Kept | _SavedTensor:
        lane = self.offload._lane
        leaves = lane is not None and self._leaves(tensor, lane.device)
        # detached: a tensor that its own op saves would hold its graph, which holds the tensor
        tensor = tensor.detach()
        if lane is None or not leaves:
            return _Kept(self.name, tensor)
        key = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        saved = self._same.get(key, lambda: None)()
        if saved is None:
            saved = _SavedTensor(self, tensor, lane)
            self.saved.append(weakref.ref(saved))
            self._same[key] = weakref.ref(saved)
        saved.uses += 1
        return saved

    def _leaves(self, tensor: torch.Tensor, device: torch.device) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.device == device
            and tensor.nbytes >= _LEAST_BYTES
            and _storage(tensor) not in self._kept
            and not self._is_weight(tensor)
        )

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """By storage: hooks see views and detached tensors, and FSDP2 gathers a parameter only while its unit runs."""
        if self._weights is None:
            own = [*self._module.parameters(), *self._module.buffers()]
            weights = {_storage(one.to_local() if hasattr(one, "to_local") else one) for one in own}
            if any(hasattr(one, "to_local") for one in own):  # perhaps not gathered yet: check again next time
                return _storage(tensor) in weights
            self._weights = weights
        return _storage(tensor) in self._weights

    def _alive(self) -> Iterable[_SavedTensor]:
        return [saved for reference in self.saved if (saved := reference()) is not None]

    def send(self) -> None:
        for saved in self._alive():
            saved.send()

    def release(self) -> None:
        for saved in self._alive():
            saved.release()

    def fetch(self) -> None:
        for saved in self._alive():
            saved.fetch()


class _Kept:
    """A saved tensor that stays. With hooks, autograd itself checks no versions."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name, self._tensor, self._version = name, tensor, tensor._version

    def unpack(self) -> torch.Tensor:
        _check_version(self._name, self._tensor, self._version)
        return self._tensor


class _SavedTensor:
    """A saved tensor: on the device, on the host, or being copied."""

    def __init__(self, group: _SavedByCall, tensor: torch.Tensor, lane: CopyLane) -> None:
        self._saved_by_call, self._lane = group, lane
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self._host: torch.Tensor | None = None
        self._work: Work = DONE
        self._like = torch.empty_like(tensor, device="meta")
        # its elements fill one span of memory, in any order of its dimensions
        self._dense = self._like.stride() == tensor.stride()
        # how often the graph holds it, and how often one backward has unpacked it so far
        self.uses = self._used = 0

    def __del__(self) -> None:
        if self._host is not None:
            # if the graph was dropped early, a copy may still be running
            self._work.wait()
            self._saved_by_call.offload.pool.give(self._host)

    def send(self) -> None:
        """Start the copy to the host; the tensor stays until `release`."""
        if self._host is not None or self._tensor is None:
            return
        offload, tensor = self._saved_by_call.offload, self._tensor
        self._host = offload.pool.take(tensor.nbytes, tensor.device)
        self._work = self._lane.copy(self._view(self._host), self._span(tensor))
        emit("offload", self._saved_by_call.name, to="host", bytes=tensor.nbytes)

    def release(self) -> None:
        """Free the tensor on the device, after the copy to the host."""
        if self._host is not None and self._tensor is not None:
            self._work.wait()
            self._checked()
            self._tensor, self._work = None, DONE

    def fetch(self) -> None:
        """Start the copy to the device."""
        if self._tensor is not None or self._host is None:
            return
        self._tensor = torch.empty_like(self._like, device=self._lane.device)
        self._work = self._lane.copy(self._span(self._tensor), self._view(self._host))
        self._version = self._tensor._version
        emit("offload", self._saved_by_call.name, to="device", bytes=self._tensor.nbytes)

    def unpack(self) -> torch.Tensor:
        """The tensor, for the backward. The first one of a group also starts the fetch of the group before."""
        self.fetch()
        before = self._saved_by_call.before()
        if before is not None:
            before.fetch()
        self._work.wait()
        tensor, self._work = self._checked(), DONE
        self._used += 1
        if self._host is not None and self._used >= self.uses:
            self._tensor, self._used = None, 0  # another backward fetches it from the host
        return tensor

    def _span(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is copied. Of dense memory the span: a device copies what has other strides in two steps, and waits."""
        return tensor.as_strided((tensor.numel(),), (1,)) if self._dense else tensor

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        like, flat = self._like, buffer[: self._like.nbytes].view(self._like.dtype)
        return flat if self._dense else flat.as_strided(like.shape, like.stride())

    def _checked(self) -> torch.Tensor:
        assert self._tensor is not None  # here, or fetched
        _check_version(self._saved_by_call.name, self._tensor, self._version)
        return self._tensor


def _check_version(name: str, tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)}, saved for the backward of {name}, was changed in place afterwards"
        )


@untraced
def _unpack(packed: _Kept | _SavedTensor) -> torch.Tensor:
    return packed.unpack()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
