"""The ops of torch_npu that `npu.py` calls, their dtypes, and what happens if no kernel is documented for a call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

import torch
from packaging.version import Version

from mindspeed_chunk.log import say_once

MINIMUM = Version("2.7.1")

_BF16 = (torch.bfloat16,)
_HALF = (torch.bfloat16, torch.float16)
_ALL = (torch.bfloat16, torch.float16, torch.float32)

# With this op the documentation of others became wider. The version does not show it, because it follows torch's:
# 2.7.1 and its posts up to 6 lack it, 2.7.1.post11 and 2.13.0 have it.
LATER = "npu_moe_token_permute_grad_v2"

# The dtypes that the documentation names: without `LATER`, and with it. For gradient ops it names none; they support
# the dtypes of their forward.
OPS: Mapping[str, tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]] = {
    "npu_moe_token_permute": (_BF16, _ALL),
    "npu_moe_token_permute_grad": (_BF16, _ALL),
    "npu_moe_token_unpermute": (_BF16, _ALL),
    "npu_grouped_matmul": (_ALL, _ALL),
    "npu_grouped_matmul_add_": (_HALF, _HALF),
    "npu_swiglu": (_ALL, _ALL),
    "npu_swiglu_backward": (_ALL, _ALL),
}


@functools.cache
def require() -> None:
    """Import torch_npu.

    Raises:
        ValueError: if it cannot be imported, or is too old.
    """
    try:
        import torch_npu
    except (ImportError, OSError) as error:
        raise ValueError(
            f"chunk_moe_backend: 'npu': torch_npu cannot be imported ({' '.join(str(error).split())}); install the one "
            f"that belongs to torch {torch.__version__}, and source CANN's set_env.sh"
        ) from error
    if Version(torch_npu.__version__) < MINIMUM:
        raise ValueError(
            f"chunk_moe_backend: 'npu': torch_npu {torch_npu.__version__}: must be {MINIMUM} or newer; install the one "
            f"that belongs to torch {torch.__version__}"
        )


def find(name: str, dtype: torch.dtype, needs: Mapping[str, bool] | None = None) -> Callable | None:
    """The op `name`, or None if the caller cannot use it; the log reports each reason once.

    Args:
        dtype: of the rows.
        needs: other requirements of the documentation, in words, and whether they are met.
    """
    problem = _problem(name, dtype, needs or {})
    if problem is None:
        return getattr(torch.ops.npu, name)
    say_once(logging.INFO, f"Chunk MoE: {problem}; torch's own operations run instead")
    return None


def _problem(name: str, dtype: torch.dtype, needs: Mapping[str, bool]) -> str | None:
    if not hasattr(torch.ops.npu, name):
        return f"this torch_npu has no {name}"
    dtypes = OPS[name][_documents_more()]
    if dtype not in dtypes:
        return f"{name} of this torch_npu is documented for {', '.join(map(str, dtypes))}, not for {dtype}"
    return next((f"{name} needs {need}" for need, holds in needs.items() if not holds), None)


@functools.cache
def _documents_more() -> bool:
    return hasattr(torch.ops.npu, LATER)
