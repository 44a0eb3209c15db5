"""The kernels of a chunked MoE layer, one module per back end, and the choice between them.

A back end is a module with the functions of `BackEnd` (`cpu.py` documents their arguments and results). The order of
the rows that `permute` returns has a format of the back end. Only the same back end may read it.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mindspeed_chunk.config import BACKENDS
from mindspeed_chunk.log import say_once
from mindspeed_chunk.ops import npu_ops
from mindspeed_chunk.ops.groups import Groups

BACK_ENDS = tuple(name for name in BACKENDS if name != "auto")


class BackEnd(Protocol):
    def count(self, keys: Tensor, num_bins: int) -> Tensor: ...
    def permute(self, x_TH: Tensor, route_TK: Tensor) -> tuple[Tensor, Tensor]: ...
    def permute_backward(self, grad_RH: Tensor, order_R: Tensor, top_k: int) -> Tensor: ...
    def unpermute(self, rows_RH: Tensor, order_R: Tensor, weight_TK: Tensor) -> Tensor: ...
    def pairs(self, order_R: Tensor) -> Tensor: ...
    def unpermute_backward(self, grad_TH: Tensor, pair_R: Tensor, top_k: int) -> Tensor: ...
    def rows_of(self, value_TK: Tensor, pair_R: Tensor) -> Tensor: ...
    def rows_of_backward(self, value_R: Tensor, order_R: Tensor, out_TK: Tensor) -> None: ...
    def regroup(self, rows_RH: Tensor, groups: Groups) -> Tensor: ...
    def regroup_backward(self, rows_RH: Tensor, groups: Groups) -> Tensor: ...
    def operand(self, rows_RH: Tensor) -> Tensor: ...
    def grouped_mm(self, rows_RH: Tensor, weight_LHF: Tensor, groups: Groups, out: Tensor | None = ...) -> Tensor: ...
    def grouped_mm_back(
        self, rows_RH: Tensor, weight_LHF: Tensor, groups: Groups, out: Tensor | None = ...
    ) -> Tensor: ...
    def grouped_mm_wgrad(self, rows_RH: Tensor, grad_RF: Tensor, groups: Groups, total_LHF: Tensor) -> None: ...
    def swiglu(self, fc1_RF: Tensor, limit: float) -> Tensor: ...
    def swiglu_backward(self, grad_RI: Tensor, fc1_RF: Tensor, limit: float, *, reuse: bool) -> Tensor: ...


if TYPE_CHECKING:  # the type checker compares the modules with the protocol here
    from mindspeed_chunk.ops import cpu, cuda, npu

    _MODULES: list[BackEnd] = [cpu, cuda, npu]


def resolve(name: str, device: torch.device) -> BackEnd:
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
