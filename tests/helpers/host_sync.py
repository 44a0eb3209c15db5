"""Finds where the host would wait for a device, on CPU tensors, where nothing ever waits.

Inside of `no_host_sync()` every tensor counts as one on a device, but for those that `HostCopy.wait` gives back, those
made without `device=`, states of generators, and what is computed from them. Seen are questions to a device tensor
(`.tolist()`, `.item()`, `bool()`), operations whose result's size depends on values (`nonzero`, boolean masks), copies
of lists and host tensors to the device, and host tensors among the operands. Two modes look: one sees Python's calls,
which on a CPU may never reach the dispatcher, the other what operations are made of.
"""

import weakref
from contextlib import contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_chunk.device import HostCopy, generator_states
from mindspeed_chunk.moe import draws

_QUESTIONS = frozenset(
    "tolist item numpy cpu __bool__ __int__ __float__ __complex__ __index__ __array__ __contains__ __repr__ "
    "__format__ allclose is_nonzero".split()
)
_FROM_HOST = frozenset("tensor as_tensor asarray from_numpy new_tensor".split())
_SIZED_BY_VALUES = frozenset(
    "_local_scalar_dense nonzero nonzero_numpy masked_select bincount _unique _unique2 unique_dim "
    "unique_consecutive equal is_nonzero".split()
)


class HostSync(AssertionError):
    """The host would wait for the device here."""


class _Host:
    """Which storages are the host's.

    makes: the call that runs makes a tensor there.
    """

    def __init__(self):
        self.makes = False
        self._storages = weakref.WeakKeyDictionary()

    def add(self, result):
        for leaf in _tensors(result):
            self._storages[leaf.untyped_storage()] = True

    def has(self, tensor):
        return tensor.untyped_storage() in self._storages

    def has_all(self, tensors):
        return bool(tensors) and all(map(self.has, tensors))


class _Asked(TorchFunctionMode):
    def __init__(self, host):
        super().__init__()
        self.host = host

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        tensors = _tensors((args, kwargs))
        if tensors and not self.host.has_all(tensors):
            if name in _QUESTIONS or (name == "to" and "cpu" in (*args, *kwargs.values())):
                raise HostSync(f"{name} of a device tensor")
            if name in ("__getitem__", "__setitem__"):
                for index in args[1] if isinstance(args[1], tuple) else (args[1],):
                    if isinstance(index, list):
                        raise HostSync(f"{name} with a list, which is copied to the device")
        if name == "new_tensor" or (name in _FROM_HOST and "device" in kwargs):
            raise HostSync(f"{name}: figures of the host are copied to the device")
        self.host.makes = not tensors and "device" not in kwargs
        result = func(*args, **kwargs)
        if self.host.makes:
            self.host.add(result)
        return result


class _Seen(TorchDispatchMode):
    def __init__(self, host):
        super().__init__()
        self.host = host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        tensors = _tensors((args, kwargs))
        # a list as an index is a tensor by now, of which nobody has told whose it is
        ours = self.host.has_all([args[0]] if name == "index" else tensors)
        if tensors and not ours:
            self._look(name, args, kwargs)
            mixed = [tuple(tensor.shape) for tensor in tensors if self.host.has(tensor) and tensor.dim() > 0]
            if mixed:
                raise HostSync(f"{name} of device tensors and of host tensors of shape {mixed}")
        result = func(*args, **kwargs)
        if ours:
            self.host.add(result)
        return result

    @staticmethod
    def _look(name, args, kwargs):
        if name in _SIZED_BY_VALUES:
            raise HostSync(name)
        if name == "histc" and kwargs.get("min", args[2:3]) == kwargs.get("max", args[3:4]):
            raise HostSync("histc without a range")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise HostSync("repeat_interleave without output_size")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            if any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1])):
                raise HostSync(f"{name} with a mask")


@contextmanager
def no_host_sync():
    """Raise `HostSync` where the host would wait for the device; `HostCopy` may, and its results are the host's.

    Yields what knows which tensors are the host's.
    """
    host, wait = _Host(), HostCopy.wait

    def waited(copy):
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            arrived = wait(copy).clone()
        host.add(arrived)
        return arrived

    def states(device):
        found = generator_states(device)
        host.add(found)
        return found

    patched = mock.patch.object(HostCopy, "wait", waited), mock.patch.object(draws, "generator_states", states)
    with patched[0], patched[1], _Asked(host), _Seen(host):
        yield host


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"]
