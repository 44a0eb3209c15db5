"""The two autograd nodes of a layer call.

`Open` launches the first dispatch, `Close` does the rest. Work that the caller computes between the two hides that
dispatch. Autograd runs nodes in reverse order of their creation. So in the backward this work hides the last combine:
`Close` runs up to it and `Open` waits for it. The edge between the nodes is an empty tensor, `edge`.

Tensors for the backward go through `ctx.save_for_backward`, where checkpoint and offload hooks see them. `Close` saves
all of them. A checkpoint with early stop ends its recompute at the last saved tensor: after the whole call. A call that
needs no backward saves none. Then the recompute may end before `Close`, but on every rank. `ctx` keeps only host-side
values. Tensors are passed from node to node within one direction, never into the backward of another forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from mindspeed_chunk.device import untraced
from mindspeed_chunk.moe.executor import Call, Walk, backward, forward
from mindspeed_chunk.moe.experts import Totals
from mindspeed_chunk.moe.plan import PendingPlan


@dataclasses.dataclass
class Opened:
    """One layer call between its nodes.

    Attributes:
        walk: the walk that one node begins and the other ends, in both directions.
        filled: something was computed between the nodes. If not, the backward of `Close` runs to the end of its walk,
            too, and `Open` only returns the result.
    """

    call: Call
    plan: PendingPlan
    walk: Walk | None = None
    filled: bool = False

    def take_over(self) -> Walk:
        walk, self.walk = self.walk, None
        assert walk is not None  # one node sets it, then the other takes it
        return walk


class _FirstOrder(torch.autograd.Function):
    """An unchanged gradient that raises an error when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            "the gradients of an MoE layer cannot be differentiated again: Chunk MoE writes its backward by hand; use "
            "dispatcher: alltoall for second derivatives"
        )


def first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """For a backward without a derivative: differentiating its results raises an error.

    torch's `once_differentiable` does this only if the incoming gradient has a derivative itself. With a constant one,
    the second-order part would be missing without an error.
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
    """`(opened, x_TH, route_TK, weight_TK) -> edge`: queue the work before the first wait, and launch the dispatch.

    The edge, `[0]`, goes to `Close`. It needs a gradient if gradients must be sent back to the tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, opened: Opened, x_TH: torch.Tensor, route_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        ctx.opened = opened
        with torch.autocast(x_TH.device.type, enabled=False):
            opened.walk = Walk(forward(opened.call, opened.plan, x_TH, route_TK, weight_TK))
        return weight_TK.new_empty(0)

    @staticmethod
    @untraced
    @first_order
    def backward(ctx: Any, edge_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(edge_grad.device.type, enabled=False):
            x_grad_TH, weight_grad_TK = ctx.opened.take_over().finish()
        return None, x_grad_TH, None, weight_grad_TK


class Close(torch.autograd.Function):
    """`(opened, edge, fc1, fc2, *activation parameters) -> out_TH`: everything after the first dispatch.

    The output has the dtype of the router weights. Every rank takes part in every exchange, whatever it received. A
    rank or chunk without rows has zero gradients, never `None`.
    """

    @staticmethod
    def forward(
        ctx: Any, opened: Opened, edge: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        call = opened.call
        with torch.autocast(fc1.device.type, enabled=False):
            done = opened.take_over().finish(call.experts(fc1, fc2))
        ctx.opened = opened
        if call.needs.any:
            # the weights themselves: a cast or transposed copy would survive FSDP2's reshard
            again = call.keep == "input"
            x_TH = done.x_TH if again else None
            route_TK = done.route_TK if again and call.dispatch.sends_routes else None
            ctx.save_for_backward(done.weight_TK, fc1, fc2, x_TH, route_TK, *done.orders, *done.kept)
        return done.out_TH

    @staticmethod
    @untraced
    @first_order
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        opened, call = ctx.opened, ctx.opened.call
        weight_TK, fc1, fc2, x_TH, route_TK, *saved = ctx.saved_tensors
        totals = Totals(call.needs, fc1, fc2, call.activation, call.transposed)
        with torch.autocast(grad_TH.device.type, enabled=False):
            experts = call.experts(fc1, fc2)
            walk = Walk(backward(call, opened.plan, grad_TH, weight_TK, experts, x_TH, route_TK, saved, totals))
            del experts, saved, x_TH, route_TK
            if not opened.filled:
                walk.finish()
        if call.needs.input:  # otherwise the other node has no backward
            opened.walk = walk
        return None, weight_TK.new_empty(0), *totals.grads(fc1, fc2, *call.activation.parameters)
