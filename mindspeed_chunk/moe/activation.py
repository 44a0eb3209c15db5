"""Activations of the expert FFN with their derivatives: SwiGLU by hand, any other callable through autograd.

R rows, I expert intermediate, F output columns of fc1 (2I for SwiGLU).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from mindspeed_chunk.moe.draws import Draws, generators_untouched
from mindspeed_chunk.ops import BackEnd

Pullback = Callable[[torch.Tensor], torch.Tensor]


class Activation(Protocol):
    """What the experts use of an activation; see `SwiGLU`."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]: ...
    def __call__(self, fc1_RF: torch.Tensor, chunk: int) -> torch.Tensor: ...
    def differentiate(
        self, fc1_RF: torch.Tensor, chunk: int, totals: Sequence[torch.Tensor], *, reuse: bool
    ) -> tuple[torch.Tensor, Pullback]: ...


class SwiGLU:
    """silu(gate) * up, with MindSpeed-MM's optional clamp; see `ops.cpu.swiglu`."""

    parameters: tuple[nn.Parameter, ...] = ()

    def __init__(self, ops: BackEnd, limit: float) -> None:
        self._ops, self._limit = ops, limit

    def __call__(self, fc1_RF: torch.Tensor, chunk: int) -> torch.Tensor:
        return self._ops.swiglu(fc1_RF, self._limit)

    def differentiate(
        self, fc1_RF: torch.Tensor, chunk: int, totals: Sequence[torch.Tensor], *, reuse: bool
    ) -> tuple[torch.Tensor, Pullback]:
        """The output `[R, I]`, which the caller may change, and the function from its gradient to that of `fc1_RF`. The
        function overwrites its argument.

        Args:
            reuse: the gradient may overwrite `fc1_RF`.
        """
        return self(fc1_RF, chunk), lambda grad_RI: self._ops.swiglu_backward(grad_RI, fc1_RF, self._limit, reuse=reuse)


class CustomActivation:
    """A caller's activation, row by row from `[R, F]` to `[R, I]`. The backward calls it again to differentiate it.

    It must give the same output for the same rows and random numbers each time. It runs with the autocast state of the
    layer's call, in the backward too, and is not called without rows.

    Args:
        draws: the random numbers of this layer call, and of its recomputes.
    """

    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        width_out: int,
        draws: Draws,
    ) -> None:
        self._function, self._device, self._width_out, self._draws = function, device, width_out, draws
        self._autocast = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The current ones: FSDP2 may replace them between the forward and the backward."""
        return trainable_parameters(self._function)

    def __call__(self, fc1_RF: torch.Tensor, chunk: int) -> torch.Tensor:
        if fc1_RF.shape[0] == 0:
            return fc1_RF.new_empty((0, self._width_out))
        with self._draws.of(chunk):
            return self._apply(fc1_RF)

    def _apply(self, fc1_RF: torch.Tensor) -> torch.Tensor:
        enabled, dtype = self._autocast
        # no cache: it would give the backward a parameter's cast from here, without the graph that it needs
        with torch.autocast(self._device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
            return self._function(fc1_RF).to(fc1_RF.dtype)

    def differentiate(
        self, fc1_RF: torch.Tensor, chunk: int, totals: Sequence[torch.Tensor], *, reuse: bool
    ) -> tuple[torch.Tensor, Pullback]:
        """As `SwiGLU.differentiate`; the function also adds the gradients of `parameters` to `totals`."""
        if fc1_RF.shape[0] == 0:
            return self(fc1_RF, chunk), lambda grad_RI: torch.empty_like(fc1_RF)
        parameters = self.parameters
        with torch.enable_grad(), self._draws.again(chunk):
            leaf_RF = fc1_RF.detach().requires_grad_()
            activated_RI = self._apply(leaf_RF)

        def pullback(grad_RI: torch.Tensor) -> torch.Tensor:
            grad_RF, *grads = torch.autograd.grad(activated_RI, (leaf_RF, *parameters), grad_RI, materialize_grads=True)
            for total, grad in zip(totals, grads, strict=True):
                total.add_(grad)
            return grad_RF

        # a copy: it may be a view of `fc1_RF`, or the pullback may still need it
        return activated_RI.detach().clone(), pullback

    def problem(self, probe_1F: torch.Tensor, *, backward_follows: bool) -> str | None:
        """The fault of the callable, found with a call on one row of zeros, or None.

        No checkpoint sees this call, and no generator changes: a recompute does not repeat it.
        """
        keep_to_itself = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        probe_1F = probe_1F.detach().requires_grad_()
        try:
            with torch.enable_grad(), keep_to_itself, generators_untouched(self._device):
                out = self._apply(probe_1F)
        except Exception as error:  # the caller's code may raise anything, and the other ranks must get the error
            return f"activation: it failed on one row of zeros: {type(error).__name__}: {' '.join(str(error).split())}"
        if out.shape != (1, self._width_out):
            return (
                f"activation: {tuple(probe_1F.shape)} became {tuple(out.shape)}: expected (1, {self._width_out}), the "
                "rows that fc2 takes"
            )
        leaves = {id(leaf) for leaf in _leaves(out)}
        if id(probe_1F) not in leaves:
            return "activation: its output does not depend on its input through operations that can be differentiated"
        if backward_follows and leaves - {id(probe_1F), *map(id, self.parameters)}:
            return (
                "activation: it uses a tensor that needs a gradient and is not a parameter of its module, so the "
                "gradient would be lost; pass an nn.Module, or a method of one"
            )
        return None


def trainable_parameters(function: Callable | None) -> tuple[nn.Parameter, ...]:
    """Parameters that need a gradient: of a module, of a bound method's module, or of a partial's function."""
    if isinstance(function, functools.partial):
        return trainable_parameters(function.func)
    module = function.__self__ if isinstance(function, types.MethodType) else function
    if not isinstance(module, nn.Module):
        return ()
    return tuple(parameter for parameter in module.parameters() if parameter.requires_grad)


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    leaves, seen, queue = [], set(), [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        queue.extend(parent for parent, _ in node.next_functions)
    return leaves
