"""The CUDA back end on CPU tensors: behind a grouped matmul that asks for what a device's asks for, and counts."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from mindspeed_chunk import ops
from mindspeed_chunk.ops import cuda

calls = []
_torchs_own = cuda._grouped_mm


def strict_grouped_mm(left, right, *, offs):
    """torch's CPU kernel, or a loop where it has none, after the checks of the one for CUDA."""
    calls.append((left.shape, right.shape))
    assert offs.dtype == torch.int32 and offs.dim() == 1
    for operand in (left, right):
        strides, bytes_ = operand.stride()[-2:], operand.element_size()
        assert min(strides) == 1 and max(strides) * bytes_ % 16 == 0 and operand.data_ptr() % 16 == 0
    if right.dim() == 2:
        # where groups of any size lie along the summed dimension, its rows must be what is contiguous
        assert left.stride(0) == 1 and right.stride(1) == 1
    else:
        assert left.stride(1) == 1
    if _torchs_own is not None:
        return _torchs_own(left, right, offs=offs)
    # a kernel reads the offsets where they are, whoever watches
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        ends = offs.tolist()
        groups = list(zip([0, *ends], ends))
        if right.dim() == 2:
            return torch.stack([left[:, start:end] @ right[start:end] for start, end in groups])
        return torch.cat([left[start:end] @ weight for (start, end), weight in zip(groups, right)])


@contextmanager
def cuda_ops(kernel=True):
    """Every layer call takes the CUDA back end; kernel: with the grouped matmul, or with one matmul an expert."""

    def refusal(device, dtype):
        return None if dtype in (torch.float32, torch.bfloat16) else "not this dtype"

    calls.clear()
    cuda._takes.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ops, "resolve", lambda name, device: cuda))
        if kernel:
            stack.enter_context(mock.patch.object(cuda, "_grouped_mm", strict_grouped_mm))
            stack.enter_context(mock.patch.object(cuda, "_device_refusal", refusal))
        yield
    cuda._takes.cache_clear()
