"""The kernels of a chunked MoE layer, one module per back end, and the choice between them.

A back end is a module with these functions (`cpu.py` documents their arguments and results):

    count, permute, permute_backward, unpermute, unpermute_backward, rows_of, rows_of_backward, regroup,
    regroup_backward, grouped_mm, grouped_mm_back, grouped_mm_wgrad, swiglu, swiglu_backward

The order of the rows that `permute` returns has a format of the back end. Only the same back end may read it.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

from mindspeed_chunk.config import BACKENDS
from mindspeed_chunk.log import say_once
from mindspeed_chunk.ops import npu_ops

BACK_ENDS = tuple(name for name in BACKENDS if name != "auto")


def resolve(name: str, device: torch.device) -> ModuleType:
    """The back end called `name`, or with "auto" the one for `device`; an automatic choice is logged once.

    Raises:
        ValueError: for an unknown name, a device without a back end, a back end for another device, or npu without
            torch_npu.
    """
    if name not in BACKENDS:
        raise ValueError(f"chunk_moe_backend: {name!r}: must be one of {', '.join(BACKENDS)}")
    chosen = device.type if name == "auto" else name
    if chosen not in BACK_ENDS:
        raise ValueError(
            f"chunk_moe_backend: {name!r}: must match the device, but {chosen} is not one of {', '.join(BACK_ENDS)}; "
            "run the model on one of these"
        )
    if chosen != device.type:
        raise ValueError(
            f"chunk_moe_backend: {name!r}: the tensors are on {device.type}; use auto, or move the model to {chosen}"
        )
    if chosen == "npu":
        npu_ops.require()
    if name == "auto":
        say_once(logging.INFO, f"Chunk MoE: back end {chosen}, chosen by the device")
    return importlib.import_module(f"{__name__}.{chosen}")
