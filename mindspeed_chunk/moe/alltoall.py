"""The plain dispatcher: permute, all-to-all, experts, all-to-all, unpermute, one after the other, through autograd.

The baseline for losses and times. It shares the exchange itself and the check of the arguments with Chunk MoE, but has
no chunks, no plan, no schedule, and no gradient written by hand.
T tokens here, H hidden, K experts per token, R rows, E experts, L = E / ep experts here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_chunk.device import HostCopy, untraced
from mindspeed_chunk.dist import all_gather, all_to_all, group_rank
from mindspeed_chunk.moe.arguments import Arguments
from mindspeed_chunk.moe.dispatcher import Dispatcher
from mindspeed_chunk.moe.reference import swiglu

__all__ = ["AllToAllDispatcher"]


class AllToAllDispatcher(Dispatcher):
    """The plain dispatcher behind MindSpeed-MM's `ep_forward` arguments; see `Dispatcher`."""

    def _call(self, arguments: Arguments) -> torch.Tensor:
        problem = arguments.problem()
        if problem is not None:
            raise ValueError(problem)
        activation = arguments.activation
        if activation is None:
            activation = functools.partial(swiglu, limit=arguments.swiglu_limit)
        num_experts, group = arguments.num_experts, arguments.group
        x_TH, pad_T = arguments.x_TH, arguments.pad_T()
        sort_TK = arguments.selected_experts.to(torch.int64)
        weight_TK = arguments.weight_TK(sort_TK)
        if pad_T is not None:
            sort_TK = sort_TK.masked_fill(pad_T[:, None], num_experts)  # after every expert, and not sent
        order_R = sort_TK.flatten().argsort(stable=True)
        counts_SE = self._gather_counts(sort_TK, num_experts, group)
        sent, received, counts_SL = _splits(counts_SE, group_rank(group))
        order_R = order_R[: sum(sent)]

        token_R = order_R // sort_TK.shape[1]
        arrived_RH = _Exchange.apply(x_TH[token_R].to(arguments.compute_dtype), sent, received, group, "forward")
        out_RH = self._experts(arrived_RH, counts_SL, arguments.fc1, arguments.fc2, activation)
        back_RH = _Exchange.apply(out_RH, received, sent, group, "forward").to(weight_TK.dtype)
        weighted_RH = back_RH * weight_TK.flatten()[order_R, None]
        out_TH = torch.zeros_like(x_TH, dtype=weight_TK.dtype).index_add(0, token_R, weighted_RH)
        return out_TH if pad_T is None else torch.where(pad_T[:, None], x_TH, out_TH.to(x_TH.dtype))

    @staticmethod
    def _gather_counts(sort_TK: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None) -> list[list[int]]:
        counts_E = torch.bincount(sort_TK.flatten(), minlength=num_experts)[:num_experts]
        gathered_SE, work = all_gather(counts_E, group, "counts")
        work.wait()
        return HostCopy(gathered_SE, "counts").wait().tolist()

    def _experts(
        self,
        arrived_RH: torch.Tensor,
        counts_SL: list[list[int]],
        fc1: torch.Tensor,
        fc2: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Each local expert on its rows, which are in (source, expert) order here and in the result."""
        pieces = arrived_RH.split([n for counts in counts_SL for n in counts])
        local = len(counts_SL[0])
        outputs: list[torch.Tensor] = [arrived_RH] * len(pieces)
        # one unbind, whose backward is one stack; indexing would make a full gradient per expert
        for expert, (fc1_e, fc2_e) in enumerate(zip(fc1.unbind(0), fc2.unbind(0), strict=True)):
            if self.weight_layout == "LFH":
                fc1_e, fc2_e = fc1_e.t(), fc2_e.t()
            own = slice(expert, None, local)
            rows_RH = activation(torch.cat(pieces[own]) @ fc1_e).to(arrived_RH.dtype) @ fc2_e
            outputs[own] = rows_RH.split([counts[expert] for counts in counts_SL])
        return torch.cat(outputs)


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows that waits for its end; its gradient is the reverse exchange."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send_splits: list[int], recv_splits: list[int], group: Any, name: str
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (recv_splits, send_splits), group
        received, work = all_to_all(rows.contiguous(), send_splits, recv_splits, group, name)
        work.wait()
        return received.view_as(received)

    @staticmethod
    @untraced
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # uses the node again, so that a second derivative has its exchange, too
        return _Exchange.apply(grad, *ctx.splits, ctx.group, "backward"), None, None, None, None


def _splits(counts_SE: list[list[int]], rank: int) -> tuple[list[int], list[int], list[list[int]]]:
    """Rows to each rank, rows from each rank, and rows by source and local expert."""
    ep = len(counts_SE)
    local = len(counts_SE[0]) // ep
    sent = [sum(counts_SE[rank][peer * local : (peer + 1) * local]) for peer in range(ep)]
    counts_SL = [counts[rank * local : (rank + 1) * local] for counts in counts_SE]
    return sent, [sum(counts) for counts in counts_SL], counts_SL
