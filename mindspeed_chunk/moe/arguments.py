"""The arguments of one layer call, as the host passes them, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_chunk.dist import group_size
from mindspeed_chunk.moe.activation import trainable_parameters
from mindspeed_chunk.moe.costs.rows import LayerShape
from mindspeed_chunk.moe.experts import NeedsGrad

WEIGHT_LAYOUTS = ("LHF", "LFH")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def order_routing(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and router weights, in any order: identified by dtype, never by position.

    Raises:
        TypeError: unless exactly one of the two has integers.
    """
    integer = [not tensor.is_floating_point() and tensor.dtype != torch.bool for tensor in (first, second)]
    if integer[0] == integer[1]:
        raise TypeError(
            f"experts were called with {first.dtype} and {second.dtype}: one must hold expert ids (integers) and the "
            "other router weights (floating point)"
        )
    return (first, second) if integer[0] else (second, first)


@dataclass(frozen=True)
class Arguments:
    """T tokens here, H hidden, K experts per token, L local experts, F output columns of fc1, I input columns of fc2.

    Attributes:
        num_experts: E, over all ranks.
        routing_weights: `[T, K]` or `[T, E]`; if K = E the former, as in the host.
        selected_experts: `[T, K]`.
        x_TH: the flattened hidden states.
        fc1, fc2: `[L, H, F]` and `[L, I, H]`, or both transposed if `weight_layout` is "LFH".
    """

    num_experts: int
    routing_weights: torch.Tensor
    selected_experts: torch.Tensor
    x_TH: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor
    weight_layout: str
    group: dist.ProcessGroup | None
    ep_balance_strategy: object | None
    swiglu_limit: float
    skip_pad: bool
    seq_mask: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor] | None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The rows' dtype, or autocast's if it is on and applies (it does not change fp64)."""
        device_type = self.x_TH.device.type
        if torch.is_autocast_enabled(device_type) and self.x_TH.dtype != torch.float64:
            return torch.get_autocast_dtype(device_type)
        return self.x_TH.dtype

    def shape(self) -> LayerShape:
        return LayerShape(
            tokens=self.x_TH.shape[0],
            hidden=self.x_TH.shape[1],
            intermediate=self.fc2_width,
            experts=self.num_experts,
            top_k=self.selected_experts.shape[1],
            ep=group_size(self.group),
            element_size=self.compute_dtype.itemsize,
        )

    @property
    def fc1_width(self) -> int:
        """F."""
        return self.fc1.shape[2 if self.weight_layout == "LHF" else 1]

    @property
    def fc2_width(self) -> int:
        """I, the width of the rows that fc2 takes."""
        return self.fc2.shape[1 if self.weight_layout == "LHF" else 2]

    @property
    def dense_weights(self) -> bool:
        """The router weights are `[T, E]`: the weight of a choice is at its expert, not at its position."""
        return self.routing_weights.shape != self.selected_experts.shape

    def weight_TK(self, route_TK: torch.Tensor) -> torch.Tensor:
        """The router weights of this call's routes."""
        if not self.dense_weights:
            return self.routing_weights
        # ids out of range are refused when the plan is read, and padded tokens have a sentinel
        return self.routing_weights.gather(1, route_TK.clamp(0, self.num_experts - 1))

    def pad_T(self) -> torch.Tensor | None:
        return self.seq_mask.reshape(-1) == 0 if self.skip_pad and self.seq_mask is not None else None

    def needs(self) -> NeedsGrad:
        if not torch.is_grad_enabled():
            return NeedsGrad(False, False, False, False, False)
        rows, weights, fc1, fc2 = (
            tensor.requires_grad for tensor in (self.x_TH, self.routing_weights, self.fc1, self.fc2)
        )
        return NeedsGrad(rows, weights, fc1, fc2, activation=bool(trainable_parameters(self.activation)))

    def problem(self) -> str | None:
        """The fault, in one line, or None. Looks only at shapes, dtypes and devices."""
        return self._routing_problem() or self._weights_problem() or self._option_problem()

    def _routing_problem(self) -> str | None:
        index, weights = self.selected_experts, self.routing_weights
        if index.dtype not in _INTEGERS or not weights.is_floating_point():
            return (
                f"selected_experts, routing_weights: {index.dtype} and {weights.dtype}: must be integers and floating "
                "point; are they in the right order?"
            )
        if index.dim() != 2 or index.shape[0] != self.x_TH.shape[0]:
            return f"selected_experts: shape {tuple(index.shape)}: must be [T, K] with T = {self.x_TH.shape[0]} tokens"
        if weights.shape not in (index.shape, (index.shape[0], self.num_experts)):
            return (
                f"routing_weights: shape {tuple(weights.shape)}: must be [T, K] = {tuple(index.shape)} or [T, E] = "
                f"({index.shape[0]}, {self.num_experts})"
            )
        return None

    def _weights_problem(self) -> str | None:
        ep = group_size(self.group)
        if self.num_experts % ep:
            return (
                f"num_experts: {self.num_experts}: must be divisible by the size of the expert-parallel group, {ep}; "
                "change parallel.expert_parallel_size"
            )
        if self.fc1.dim() != 3 or self.fc2.dim() != 3:
            return f"fc1_weight, fc2_weight: {self.fc1.dim()} and {self.fc2.dim()} dimensions: must be 3, experts first"
        local, hidden = self.num_experts // ep, self.x_TH.shape[1]
        width = self.fc2_width
        fc1_width = self.fc1_width if self.activation is not None else 2 * width
        fc1, fc2 = (local, hidden, fc1_width), (local, width, hidden)
        if self.weight_layout == "LFH":
            fc1, fc2 = (local, fc1_width, hidden), (local, hidden, width)
        if self.fc1.shape != fc1 or self.fc2.shape != fc2:
            return (
                f"fc1_weight, fc2_weight: shapes {tuple(self.fc1.shape)} and {tuple(self.fc2.shape)}: must be {fc1} "
                f"and {fc2} for {local} local experts, hidden size {hidden} and weight layout {self.weight_layout}"
            )
        if self.compute_dtype == self.x_TH.dtype and not self.fc1.dtype == self.fc2.dtype == self.x_TH.dtype:
            return (
                f"fc1_weight, fc2_weight: {self.fc1.dtype} and {self.fc2.dtype}: must have the dtype of the rows, "
                f"{self.x_TH.dtype}"
            )
        return None

    def _option_problem(self) -> str | None:
        if self.ep_balance_strategy is not None:
            return "features.enable_ep_balance: true: Chunk MoE does not support it; use dispatcher: alltoall"
        if self.skip_pad and self.seq_mask is None:
            return "seq_mask: None: must be given if skip_moe_pad_tokens is on"
        if self.skip_pad and self.seq_mask is not None and self.seq_mask.numel() != self.x_TH.shape[0]:
            return f"seq_mask: {self.seq_mask.numel()} values: must be one for each of the {self.x_TH.shape[0]} tokens"
        if self.activation is not None and self.swiglu_limit > 0:
            return "swiglu_limit: has no effect with your own activation; leave it 0"
        return None
