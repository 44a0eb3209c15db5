"""The two nodes of the autograd graph that a layer call is.

`Open` launches the first dispatch, `Close` does the rest. What the caller computes between the two hides that dispatch
and, because autograd runs nodes in reverse order of their creation, in the backward the last combine: there `Close`
walks up to it and `Open` waits for it. A token is the edge between them.

What the backward needs goes through `ctx.save_for_backward`, where checkpoint and offload hooks see it. `Close` saves
all of it: the early stop of a checkpoint then ends a recompute behind the whole call, or, where the call needs no
backward, before `Close` on every rank. `ctx` keeps host-side values only; tensors pass from node to node within one
direction, never into the backward of another forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_chunk.device import untraced
from mindspeed_chunk.moe.executor import Backward, Call, Forward
from mindspeed_chunk.moe.plan import PendingPlan


class Opened:
    """One layer call between its nodes: the walk that one of them begins and the other ends, in either direction.

    Attributes:
        filled: something was computed between the nodes; otherwise the backward has no reason to leave its last rows
            on the wire while it goes from one to the other.
    """

    def __init__(self, call: Call, plan: PendingPlan) -> None:
        self.call, self.plan, self.filled = call, plan, False
        self._walk: Forward | Backward | None = None

    def hand_over(self, walk: Forward | Backward) -> None:
        self._walk = walk

    def take_over(self) -> Forward | Backward:
        walk, self._walk = self._walk, None
        assert walk is not None  # one node hands over, then the other takes
        return walk

    def abandon(self) -> None:
        """The call will not be closed: let the rows on the wire arrive before their buffers go."""
        self.take_over().abandon()


class _FirstOrder(torch.autograd.Function):
    """A gradient as it is, which refuses to be differentiated."""

    @staticmethod
    def forward(ctx, grad):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "the gradients of an MoE layer cannot be differentiated again: Chunk MoE writes its backward by hand; use "
            "dispatcher: alltoall for second derivatives"
        )


def first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """For a backward without a derivative: to differentiate its results raises an error.

    torch's `once_differentiable` does this only where the incoming gradient has a derivative itself. Behind a constant
    one the second-order part would be missing in silence.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: torch.Tensor) -> tuple:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        return tuple(None if grad is None else _FirstOrder.apply(grad.requires_grad_()) for grad in results)

    return refusing


class Open(torch.autograd.Function):
    """`(opened, x_TH, route_TK, weight_TK) -> token`: queue what comes before the first wait, and launch that dispatch.

    The token, `[0]`, goes to `Close`. It needs a gradient if something has to travel back to the tokens.
    """

    @staticmethod
    def forward(ctx, opened, x_TH, route_TK, weight_TK):
        ctx.opened = opened
        with torch.autocast(x_TH.device.type, enabled=False):
            walk = Forward(opened.call, opened.plan, x_TH, route_TK, weight_TK)
            walk.start()
        opened.hand_over(walk)
        return weight_TK.new_empty(0)

    @staticmethod
    @untraced
    @first_order
    def backward(ctx, token_grad):
        walk = ctx.opened.take_over()
        with torch.autocast(token_grad.device.type, enabled=False):
            walk.finish()
        return None, walk.x_grad_TH, None, walk.weight_grad_TK


class Close(torch.autograd.Function):
    """`(opened, token, fc1, fc2, *activation parameters) -> out_TH`: everything after the first dispatch.

    The output has the dtype of the router weights. Every rank takes part in every exchange whatever it received; a rank
    or chunk without rows contributes zero gradients, never `None`.
    """

    @staticmethod
    def forward(ctx, opened, token, fc1, fc2, *activation_parameters):
        call, walk = opened.call, opened.take_over()
        with torch.autocast(fc1.device.type, enabled=False):
            walk.finish_with(call.experts(fc1, fc2))
        ctx.opened = opened
        if call.needs.any:
            # the weights themselves, not a cast or transposed copy, which would survive FSDP2's reshard
            x_TH = walk.x_TH if call.keep == "input" else None
            ctx.save_for_backward(walk.weight_TK, fc1, fc2, x_TH, *walk.orders, *walk.saved)
        return walk.out_TH

    @staticmethod
    @untraced
    @first_order
    def backward(ctx, grad_TH):
        opened = ctx.opened
        weight_TK, fc1, fc2, x_TH, *saved = ctx.saved_tensors
        with torch.autocast(grad_TH.device.type, enabled=False):
            walk = Backward(opened.call, opened.plan, grad_TH, weight_TK, fc1, fc2, x_TH, saved)
            del saved, x_TH
            walk.start()
            if not opened.filled:
                walk.finish()
        weight_grads = [
            None if total is None else total.to(weight.dtype)
            for total, weight in ((walk.fc1_total, fc1), (walk.fc2_total, fc2))
        ]
        activation_grads = [
            total.to(parameter.dtype)
            for total, parameter in zip(walk.activation_totals, opened.call.activation.parameters, strict=True)
        ]
        if opened.call.needs.input:  # otherwise nobody comes for it
            walk.keep_what_is_left()
            opened.hand_over(walk)
        return None, weight_TK.new_empty(0), *weight_grads, *activation_grads
