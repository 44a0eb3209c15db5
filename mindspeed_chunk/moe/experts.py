"""The expert FFN of one chunk: forward, input gradient, weight gradients.

R rows here, H hidden, I expert intermediate, F output columns of fc1 (2I for SwiGLU), L experts here.

With y = b @ fc2, b = activation(x @ fc1), and a token's output sum_k w_k y_k, let g be the gradient of the token's
output. Then the gradient of y is w g and that of w is g . y = g . (b @ fc2) = b . (g @ fc2^T). So the expert's
backward also gives the router's gradient, from the unweighted g, without y and without a division by w.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from mindspeed_chunk.moe.activation import Activation
from mindspeed_chunk.ops import BackEnd
from mindspeed_chunk.ops.groups import Groups


@dataclasses.dataclass(frozen=True)
class NeedsGrad:
    """Which gradients a layer call must compute."""

    rows: bool
    weights: bool
    fc1: bool
    fc2: bool
    activation: bool

    @property
    def any(self) -> bool:
        return self.input or self.experts

    @property
    def input(self) -> bool:
        """Gradients are sent back to the tokens."""
        return self.rows or self.weights

    @property
    def experts(self) -> bool:
        return self.fc1 or self.fc2 or self.activation


class AtExperts(NamedTuple):
    """A chunk's gradients at the experts in the backward.

    Attributes:
        grad_RH: the gradients of the tokens' outputs, one for each row, without the router weights.
        weight_R: the router weight of each row.
        rows: makes the rows `[R, H]`; may be called twice.
        back: what `Dispatch.pack_input_grads` needs.
    """

    grad_RH: torch.Tensor
    weight_R: torch.Tensor
    rows: Callable[[], torch.Tensor]
    back: tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class WeightOperands:
    """Operands of one chunk's weight gradients: fc1's is rows^T grad_fc1, fc2's is activated^T grad_rows."""

    rows: Callable[[], torch.Tensor] | None
    grad_fc1_RF: torch.Tensor | None
    activated_RI: torch.Tensor | None
    grad_rows_RH: torch.Tensor
    groups: Groups


class Totals:
    """Sums of the gradients of weights and of the activation's parameters over all chunks: fp32 for narrower ones.

    Attributes:
        fc1_LHF, fc2_LIH: None where not needed.
        activation: of each parameter that needs one.
    """

    def __init__(
        self, needs: NeedsGrad, fc1: torch.Tensor, fc2: torch.Tensor, activation: Activation, transposed: bool
    ):
        self._fc1 = _zeros(fc1) if needs.fc1 else None
        self._fc2 = _zeros(fc2) if needs.fc2 else None
        self.fc1_LHF = None if self._fc1 is None else as_rows_times(self._fc1, transposed)
        self.fc2_LIH = None if self._fc2 is None else as_rows_times(self._fc2, transposed)
        self.activation = [_zeros(parameter) for parameter in activation.parameters]

    def grads(self, *of: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients of fc1, fc2 and the activation's parameters, each in its dtype. The sums are freed."""
        totals = [self._fc1, self._fc2, *self.activation]
        self._fc1 = self._fc2 = self.fc1_LHF = self.fc2_LIH = None
        self.activation.clear()
        grads: list[torch.Tensor | None] = [None] * len(totals)
        # one at a time, the smaller ones first: each sum is freed before the next one is cast
        for place in reversed(range(len(totals))):
            total = totals.pop()
            if total is not None:
                grads[place] = total.to(of[place].dtype)
                del total
        return grads


def as_rows_times(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """A weight, or the total of its gradient, as `[L, in, out]`: rows are multiplied with it from the left."""
    return weight.transpose(1, 2) if transposed else weight


def _zeros(like: torch.Tensor) -> torch.Tensor:
    narrow = like.dtype in (torch.bfloat16, torch.float16)
    return torch.zeros(like.shape, dtype=torch.float32 if narrow else like.dtype, device=like.device)


class Experts:
    """The local experts of one layer call, with one back end."""

    def __init__(
        self,
        ops: BackEnd,
        activation: Activation,
        fc1: torch.Tensor,
        fc2: torch.Tensor,
        transposed: bool,
    ) -> None:
        self._ops, self._activation = ops, activation
        self._fc1_LHF, self._fc2_LIH = as_rows_times(fc1, transposed), as_rows_times(fc2, transposed)

    def fc1(self, rows_RH: torch.Tensor, groups: Groups) -> torch.Tensor:
        """`[R, F]`."""
        return self._ops.grouped_mm(rows_RH, self._fc1_LHF, groups)

    def activate(self, fc1_RF: torch.Tensor, chunk: int) -> torch.Tensor:
        """`[R, I]`."""
        return self._activation(fc1_RF, chunk)

    def fc2(self, activated_RI: torch.Tensor, groups: Groups) -> torch.Tensor:
        """The experts' output `[R, H]`, in (source, expert) order."""
        return self._ops.grouped_mm_back(activated_RI, self._fc2_LIH, groups)

    def input_grad(
        self,
        arrived: AtExperts,
        fc1_RF: torch.Tensor | None,
        groups: Groups,
        chunk: int,
        needs: NeedsGrad,
        activation_totals: Sequence[torch.Tensor],
    ) -> tuple[WeightOperands, torch.Tensor | None]:
        """The operands of the weight gradients, and the gradients of the router weights `[R]`, if these are needed.

        Args:
            fc1_RF: the output of fc1, or None to compute it again from the rows.
            activation_totals: the activation's parameter gradients are added to these.
        """
        again = fc1_RF is None
        if fc1_RF is None:
            fc1_RF = self.fc1(arrived.rows(), groups)
        # a saved tensor stays unchanged; one made here is overwritten by its gradient
        activated_RI, pullback = self._activation.differentiate(fc1_RF, chunk, activation_totals, reuse=again)
        grad_fc1_RF = weight_grad_R = None
        if needs.input or needs.fc1 or needs.activation:
            grad_RI = self._ops.grouped_mm(arrived.grad_RH, self._fc2_LIH.transpose(1, 2), groups)
            if needs.weights:
                weight_grad_R = _row_dot(activated_RI, grad_RI)
            grad_fc1_RF = pullback(grad_RI.mul_(arrived.weight_R[:, None]))
        # w goes to the narrower factor of (w b)^T g = b^T (w g)
        scaled_RI = activated_RI.mul_(arrived.weight_R[:, None]) if needs.fc2 else None
        operands = WeightOperands(arrived.rows, grad_fc1_RF, scaled_RI, arrived.grad_RH, groups)
        return operands, weight_grad_R

    def rows_grad(self, operands: WeightOperands, out_RH: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the rows, from that of fc1's output, in (source, expert) order; in `out_RH` if given."""
        assert operands.grad_fc1_RF is not None  # rows need a gradient
        return self._ops.grouped_mm_back(
            operands.grad_fc1_RF, self._fc1_LHF.transpose(1, 2), operands.groups, out=out_RH
        )

    def weight_grad(
        self, operands: WeightOperands, fc1_total_LHF: torch.Tensor | None, fc2_total_LIH: torch.Tensor | None
    ) -> WeightOperands:
        """Add one chunk's weight gradients to the given totals; return the operands that the other one still needs."""
        if fc1_total_LHF is not None:
            assert operands.rows is not None and operands.grad_fc1_RF is not None
            self._ops.grouped_mm_wgrad(operands.rows(), operands.grad_fc1_RF, operands.groups, fc1_total_LHF)
            operands = dataclasses.replace(operands, rows=None, grad_fc1_RF=None)
        if fc2_total_LIH is not None:
            assert operands.activated_RI is not None
            self._ops.grouped_mm_wgrad(operands.activated_RI, operands.grad_rows_RH, operands.groups, fc2_total_LIH)
        return operands


def _row_dot(left_RI: torch.Tensor, right_RI: torch.Tensor) -> torch.Tensor:
    """The dot product of each pair of rows, `[R]`, computed in fp32 if the rows are narrower."""
    if left_RI.dtype in (torch.bfloat16, torch.float16):
        return left_RI.float().mul_(right_RI).sum(-1)  # one fp32 tensor of this size, not three
    return (left_RI * right_RI).sum(-1)
