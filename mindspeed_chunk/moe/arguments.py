"""The arguments of one layer call, as the host hands them over, and what can be wrong with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_chunk.device import untraced
from mindspeed_chunk.dist import group_size
from mindspeed_chunk.moe.activation import trainable_parameters
from mindspeed_chunk.moe.experts import Needs

WEIGHT_LAYOUTS = ("LHF", "LFH")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Arguments:
    """T tokens here, H hidden, K experts a token, L local experts, F what fc1 puts out, I what fc2 takes.

    Attributes:
        num_experts: E, over all ranks.
        routing_weights: `[T, K]` or `[T, E]`; where K = E the former, as the host reads it.
        selected_experts: `[T, K]`.
        x_TH: the flattened hidden states.
        fc1, fc2: `[L, H, F]` and `[L, I, H]`, or both transposed where `weight_layout` is "LFH".
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
        """The rows' dtype, or autocast's where that is on and applies (it leaves fp64 alone)."""
        device_type = self.x_TH.device.type
        if torch.is_autocast_enabled(device_type) and self.x_TH.dtype != torch.float64:
            return torch.get_autocast_dtype(device_type)
        return self.x_TH.dtype

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
        """The router weights are `[T, E]`: each choice has its weight at its expert, not at its place."""
        return self.routing_weights.shape != self.selected_experts.shape

    def weight_TK(self, route_TK: torch.Tensor) -> torch.Tensor:
        """The router weights of the routes that this call takes."""
        if not self.dense_weights:
            return self.routing_weights
        # ids out of range are refused when the plan is read, and padded tokens have a sentinel
        return self.routing_weights.gather(1, route_TK.clamp(0, self.num_experts - 1))

    def pad_T(self) -> torch.Tensor | None:
        return self.seq_mask.reshape(-1) == 0 if self.skip_pad and self.seq_mask is not None else None

    def needs(self) -> Needs:
        if not torch.is_grad_enabled():
            return Needs(False, False, False, False, False)
        rows, weights, fc1, fc2 = (
            tensor.requires_grad for tensor in (self.x_TH, self.routing_weights, self.fc1, self.fc2)
        )
        return Needs(rows, weights, fc1, fc2, activation=bool(trainable_parameters(self.activation)))

    def problem(self) -> str | None:
        """What is wrong, in one line, or None. Looks at shapes, dtypes and devices only."""
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
            return "features.enable_ep_balance: true: Chunk MoE has no such thing; use dispatcher: alltoall"
        if self.skip_pad and self.seq_mask is None:
            return "seq_mask: None: must be given where skip_moe_pad_tokens is on"
        if self.skip_pad and self.seq_mask is not None and self.seq_mask.numel() != self.x_TH.shape[0]:
            return f"seq_mask: {self.seq_mask.numel()} values: must be one for each of the {self.x_TH.shape[0]} tokens"
        if self.activation is not None and self.swiglu_limit > 0:
            return "swiglu_limit: has no meaning beside an activation of your own; leave it 0"
        return None


class Dispatcher(ABC):
    """What is called as MindSpeed-MM's `ep_forward`: a subclass says in `_call` what comes of the arguments.

    Args:
        weight_layout: "LHF" for fc1 `[L, H, F]` and fc2 `[L, I, H]`, as MindSpeed-MM has them; "LFH" for `[L, F, H]`
            and `[L, H, I]`, as transformers has them. Never guessed from shapes.
    """

    def __init__(self, *, weight_layout: str = "LHF") -> None:
        if weight_layout not in WEIGHT_LAYOUTS:
            raise ValueError(f"weight_layout: {weight_layout!r}: must be one of {', '.join(WEIGHT_LAYOUTS)}")
        self.weight_layout = weight_layout

    @untraced
    def __call__(
        self,
        num_experts: int,
        routing_weights: torch.Tensor,
        selected_experts: torch.Tensor,
        hidden_states: torch.Tensor,
        fc1_weight: torch.Tensor,
        fc2_weight: torch.Tensor,
        ep_group: dist.ProcessGroup | None = None,
        fused: bool = True,
        swiglu_limit: float = 0.0,
        ep_balance_strategy: object | None = None,
        skip_moe_pad_tokens: bool = False,
        seq_mask: torch.Tensor | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Send every token to its experts and bring back the weighted sum of what they make of it.

        Args:
            num_experts: E, over all ranks.
            routing_weights: `[T, K]`, or `[T, E]` to be gathered by `selected_experts` (where K = E: the former, as
                the host has it). Floating point.
            selected_experts: `[T, K]`, integers in [0, E).
            hidden_states: `[..., H]`, flattened to `[T, H]`. T may differ from rank to rank and from call to call.
            fc1_weight, fc2_weight: the local experts', in the constructor's layout and the dtype of the rows.
            ep_group: the expert-parallel ranks; None where all experts are here.
            fused: accepted for the host's sake. Which kernels run is the back end's business (`chunk_moe_backend`).
            swiglu_limit: where positive, SwiGLU's inputs are clamped to it.
            ep_balance_strategy: must be None.
            skip_moe_pad_tokens: tokens whose `seq_mask` is 0 are not sent and come back as they are.
            seq_mask: T values, 0 for padding.
            activation: in place of SwiGLU; rows `[n, F]` to `[n, I]`, each row by itself.

        Returns:
            `[T, H]`, in the dtype of `routing_weights` (of `hidden_states` with `skip_moe_pad_tokens`).

        Raises:
            ValueError: on every rank, before any row is sent: for arguments that do not fit each other, E not divisible
                by the group's size, expert ids out of range, or ranks that differ in what must be equal. Only an E
                that changes after the first call, and on some ranks alone, cannot be told.
        """
        arguments = Arguments(
            num_experts=num_experts,
            routing_weights=routing_weights,
            selected_experts=selected_experts,
            x_TH=hidden_states.reshape(-1, hidden_states.shape[-1]),
            fc1=fc1_weight,
            fc2=fc2_weight,
            weight_layout=self.weight_layout,
            group=ep_group,
            ep_balance_strategy=ep_balance_strategy,
            swiglu_limit=swiglu_limit,
            skip_pad=skip_moe_pad_tokens,
            seq_mask=seq_mask,
            activation=activation,
        )
        return self._call(arguments)

    @abstractmethod
    def _call(self, arguments: Arguments) -> torch.Tensor:
        """The output, `[T, H]`."""
