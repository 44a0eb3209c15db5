"""The wheel, with CPU kernels for what npu.py calls, in a process of its own; and what was called, with which lines."""

import contextlib
import dis
import functools
import sys
import types
import warnings
from pathlib import Path

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from ascend import kernels, wheel
from mindspeed_chunk import ops

called: set[str] = set()
# Calls that the wheel's own meta kernel refuses, by what it says.
meta_refusals: set[str] = set()
_library: torch.library.Library | None = None
_atens: torch.library.Library | None = None


def install(folder: Path) -> types.ModuleType:
    """Load the wheel and its CPU kernels into this process; returns the NPU back end."""
    global _library, _atens
    if _library is None:
        wheel.load(folder)
        # torch_npu makes the NPU what a checkpoint takes its tensors to be on
        torch.utils.checkpoint.DefaultDeviceType.set_device_type("cpu")
        _library = torch.library.Library("npu", "IMPL")
        for name, kernel in kernels.KERNELS.items():
            _library.impl(name, _recorded(name, kernel), "CPU")
        _atens = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that it replaces the CPU's own
            _atens.impl("histc", _unwatched(kernels.histc), "CPU")
    from mindspeed_chunk.ops import npu

    return npu


@contextlib.contextmanager
def back_end(module: types.ModuleType):
    """Layers run on `module`, whatever the device of their tensors."""
    original, ops.resolve = ops.resolve, lambda name, device: module
    try:
        yield
    finally:
        ops.resolve = original


def _unwatched(kernel):
    """A kernel may read any value, also while the calls around it are watched."""

    @functools.wraps(kernel)
    def call(*args, **kwargs):
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return kernel(*args, **kwargs)

    return call


def _recorded(name, kernel):
    @functools.wraps(kernel)
    def call(*args, **kwargs):
        called.add(name)
        expected = _on_meta(name, args, kwargs)
        out = kernel(*args, **kwargs)
        if expected is not None:
            assert list(map(_kind, tree_flatten(out)[0])) == list(map(_kind, tree_flatten(expected)[0])), name
        return out

    return _unwatched(call)


def _on_meta(name, args, kwargs):
    """What the wheel makes of the call on meta tensors, or None where it has no kernel, or that one refuses."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta"):
        meta_refusals.add(f"{name}: no meta kernel")
        return None
    args, kwargs = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, (args, kwargs))
    try:
        return getattr(torch.ops.npu, name)(*args, **kwargs)
    except RuntimeError as error:
        meta_refusals.add(f"{name}: {str(error).splitlines()[0]}")
        return None


def _kind(value):
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


class Lines:
    """The lines of a module that ran, in this thread."""

    def __init__(self, module: types.ModuleType) -> None:
        self._path = module.__file__
        self.ran: set[int] = set()

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if frame.f_code.co_filename != self._path:
            return None
        if event == "line":
            self.ran.add(frame.f_lineno)
        return self._trace

    def of_functions(self) -> set[int]:
        """The lines that a function has: those of the module itself ran when it was imported."""
        code = compile(Path(self._path).read_text(), self._path, "exec")
        found, queue = set(), [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        while queue:
            function = queue.pop()
            found |= {line for _, line in dis.findlinestarts(function) if line} - {function.co_firstlineno}
            queue += [constant for constant in function.co_consts if isinstance(constant, types.CodeType)]
        return found
