"""How rows travel between tokens and experts, in both directions: one row per expert of a token, or one per rank.

The executor (`executor.py`) decides when; the two classes here decide what is sent and what comes back.

* `PerExpert`: each (token, k) pair is a row. The combine returns its expert's output, and the source weighs and sums.
* `PerRank`: a token is a row for each rank that has experts of it. Its expert ids and router weights are sent with it.
  The rows that a rank receives are a small MoE layer there: permute, experts, weigh, sum. The source sums over ranks.
  In the backward the gradient of the output goes the same way, and the gradients of the weights return with the rows.

Nothing here communicates: `pack_*` makes the rows for an exchange, `unpack_*` and `sum_*` use those that arrived.

T tokens here, H hidden, K experts per token, E experts, L = E / ep experts here, ep ranks. S rows sent, Q rows
received, R rows at the experts (Q for `PerExpert`), W width of a packed row.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mindspeed_chunk.dist import group_rank, group_size
from mindspeed_chunk.log import say_once
from mindspeed_chunk.moe.arguments import Arguments
from mindspeed_chunk.moe.costs.rows import PER_RANK, resolve_dispatch, share_of_bytes
from mindspeed_chunk.moe.experts import AtExperts, NeedsGrad
from mindspeed_chunk.moe.packing import Packing
from mindspeed_chunk.moe.plan import ChunkPlan, rank_slots
from mindspeed_chunk.ops import BackEnd
from mindspeed_chunk.ops.groups import Groups

Stored = Sequence[torch.Tensor]


def choose_dispatch(setting: str, arguments: Arguments) -> str:
    """The kind of a call's dispatch: "per_expert" or "per_rank"; `setting` is `chunk_moe_dispatch`. Logged once."""
    shape, router_size = arguments.shape(), arguments.routing_weights.element_size()
    kind = resolve_dispatch(setting, shape, router_size)
    if shape.ep > 1:
        say_once(
            logging.INFO,
            f"Chunk MoE: chunk_moe_dispatch: {setting}: {kind}; with uniform routing, per_rank sends "
            f"{share_of_bytes(shape, router_size):.2f} of the bytes of per_expert ({shape.experts} experts, "
            f"{shape.top_k} per token, {shape.ep} ranks)",
        )
    return kind


class Dispatch(Protocol):
    """One kind of dispatch for one layer call; holds sizes and no tensor."""

    sends_routes: bool  # the backward needs the routes if only the input was kept

    def padding_rows(self, plan: ChunkPlan) -> int:
        """Zero rows after those that a combine returns."""

    def targets(self, route_TK: torch.Tensor) -> torch.Tensor:
        """The ids by which rows are sorted, `[T, D]`: experts (D = K), or ranks. For all chunks at once."""

    def pack_tokens(
        self,
        x_TH: torch.Tensor,
        route_TK: torch.Tensor,
        target_TD: torch.Tensor,
        weight_TK: torch.Tensor,
        num_rows: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows to send `[S, W]` and their order. `num_rows` is S, or None if the plan is not read yet."""

    def unpack_tokens(self, received_QW: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, Stored]:
        """The rows `[R, H]` in the order of the experts, and what a backward needs of them."""

    def pack_outputs(self, out_RH: torch.Tensor, stored: Stored, groups: Groups) -> torch.Tensor:
        """The rows to return `[Q, H]`, from the experts' outputs as `Experts.fc2` orders them."""

    def sum_outputs(self, received_SH: torch.Tensor, order: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        """The output of the chunk's tokens `[T, H]`, in the dtype of the router weights."""

    def pack_grads(
        self,
        grad_TH: torch.Tensor,
        x_TH: torch.Tensor | None,
        route_TK: torch.Tensor | None,
        weight_TK: torch.Tensor,
        order: torch.Tensor,
        num_rows: int | None,
    ) -> torch.Tensor:
        """The rows to send in the backward; `x_TH` and `route_TK` are given if only the input was kept."""

    def unpack_grads(self, received_QW: torch.Tensor, stored: Stored, groups: Groups) -> AtExperts:
        """What the experts' backward needs. `stored` is empty if only the input was kept."""

    def pack_input_grads(
        self,
        rows_grad: Callable[[torch.Tensor | None], torch.Tensor],
        weight_grad_R: torch.Tensor | None,
        back: Stored,
        groups: Groups,
    ) -> torch.Tensor:
        """The rows to return in the backward. `rows_grad` makes the rows' gradients, in a given tensor or a new one."""

    def sum_input_grads(
        self, received_SW: torch.Tensor, order: torch.Tensor, weight_grad_TK: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The gradient of the chunk's tokens, if it is needed; that of its router weights goes to `weight_grad_TK`."""


@dataclass(frozen=True)
class _Sizes:
    """What both kinds know of a call."""

    ops: BackEnd
    needs: NeedsGrad
    keep: str
    hidden: int
    top_k: int
    num_experts: int
    ranks: int
    rank: int
    dtype: torch.dtype
    weight_dtype: torch.dtype

    @property
    def _back_hidden(self) -> int:
        return self.hidden if self.needs.rows else 0

    @property
    def _again(self) -> bool:
        """The backward sends the tokens again."""
        return self.keep == "input"


class PerExpert(_Sizes):
    """See the module."""

    sends_routes = False

    def padding_rows(self, plan: ChunkPlan) -> int:
        return plan.num_tokens * self.top_k - plan.num_sent  # the rows of padded tokens, which are not sent

    @property
    def _out(self) -> Packing:
        return Packing(self.hidden * (2 if self._again else 1), self.dtype, ((1, self.weight_dtype),))

    @property
    def _back(self) -> Packing:
        return Packing(self._back_hidden, self.dtype, ((1, self.weight_dtype),))

    def targets(self, route_TK: torch.Tensor) -> torch.Tensor:
        return route_TK

    def pack_tokens(
        self,
        x_TH: torch.Tensor,
        route_TK: torch.Tensor,
        target_TD: torch.Tensor,
        weight_TK: torch.Tensor,
        num_rows: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.permute(x_TH, target_TD)

    def unpack_tokens(self, received_QW: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, Stored]:
        rows_RH = self.ops.regroup(received_QW, groups)
        return rows_RH, (rows_RH,)

    def pack_outputs(self, out_RH: torch.Tensor, stored: Stored, groups: Groups) -> torch.Tensor:
        return out_RH

    def sum_outputs(self, received_SH: torch.Tensor, order: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        return self.ops.unpermute(received_SH, order, weight_TK)

    def pack_grads(
        self,
        grad_TH: torch.Tensor,
        x_TH: torch.Tensor | None,
        route_TK: torch.Tensor | None,
        weight_TK: torch.Tensor,
        order: torch.Tensor,
        num_rows: int | None,
    ) -> torch.Tensor:
        packed_TW = self._out.pack(grad_TH) if x_TH is None else self._out.pack(grad_TH, x_TH)
        pair_S = self.ops.pairs(order)
        send_SW = self.ops.unpermute_backward(packed_TW, pair_S, self.top_k)
        self._out.array(send_SW, 0)[:, 0].copy_(self.ops.rows_of(weight_TK, pair_S))
        return send_SW

    def unpack_grads(self, received_QW: torch.Tensor, stored: Stored, groups: Groups) -> AtExperts:
        packed_RW = self.ops.regroup(received_QW, groups)
        operand = self.ops.operand
        rows_RH = operand(packed_RW[:, self.hidden : 2 * self.hidden]) if self._again else stored[0]
        weight_R = operand(self._out.array(packed_RW, 0)[:, 0])
        return AtExperts(operand(packed_RW[:, : self.hidden]), weight_R, lambda: rows_RH, ())

    def pack_input_grads(
        self,
        rows_grad: Callable[[torch.Tensor | None], torch.Tensor],
        weight_grad_R: torch.Tensor | None,
        back: Stored,
        groups: Groups,
    ) -> torch.Tensor:
        send_QW = self._back.empty(groups.num_rows, groups.on_device)
        if weight_grad_R is not None:
            self._back.array(send_QW, 0)[:, 0].copy_(self.ops.regroup_backward(weight_grad_R, groups))
        if self.needs.rows:
            rows_grad(send_QW[:, : self.hidden])
        return send_QW

    def sum_input_grads(
        self, received_SW: torch.Tensor, order: torch.Tensor, weight_grad_TK: torch.Tensor | None
    ) -> torch.Tensor | None:
        if weight_grad_TK is not None:
            self.ops.rows_of_backward(self._back.array(received_SW, 0)[:, 0], order, weight_grad_TK)
        if not self.needs.rows:
            return None
        return self.ops.permute_backward(received_SW, order, self.top_k)[:, : self.hidden]


class PerRank(_Sizes):
    """See the module. A slot without an expert here is left out of every sum, never multiplied by zero."""

    sends_routes = True

    def padding_rows(self, plan: ChunkPlan) -> int:
        return 0

    @property
    def _slots(self) -> int:
        return min(self.top_k, self.ranks)

    def _packing(self, columns: int) -> Packing:
        return Packing(columns, self.dtype, ((self.top_k, torch.int32), (self.top_k, self.weight_dtype)))

    @property
    def _out(self) -> Packing:
        return self._packing(2 * self.hidden) if self._again else Packing(self.hidden, self.dtype)

    @property
    def _back(self) -> Packing:
        return Packing(self._back_hidden, self.dtype, ((self.top_k, self.weight_dtype),))

    def _write_routing(self, packing: Packing, packed_TW: torch.Tensor, *routing: torch.Tensor) -> None:
        for number, values_TK in enumerate(routing):
            packing.array(packed_TW, number).copy_(values_TK)

    def _local_QK(self, packing: Packing, packed_QW: torch.Tensor) -> torch.Tensor:
        """The local expert of each slot; L for an expert of another rank."""
        local = self.num_experts // self.ranks
        local_QK = packing.array(packed_QW, 0) - self.rank * local
        return torch.where((local_QK >= 0) & (local_QK < local), local_QK, local)

    def targets(self, route_TK: torch.Tensor) -> torch.Tensor:
        return rank_slots(route_TK, self.num_experts, self.ranks)

    def pack_tokens(
        self,
        x_TH: torch.Tensor,
        route_TK: torch.Tensor,
        target_TD: torch.Tensor,
        weight_TK: torch.Tensor,
        num_rows: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packing = self._packing(self.hidden)
        packed_TW = packing.pack(x_TH)
        self._write_routing(packing, packed_TW, route_TK, weight_TK)
        return self.ops.permute(packed_TW, target_TD, num_rows)

    def unpack_tokens(self, received_QW: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, Stored]:
        packing, operand = self._packing(self.hidden), self.ops.operand
        x_QH, weight_QK = operand(received_QW[:, : self.hidden]), operand(packing.array(received_QW, 1))
        rows_RH, order = self.ops.permute(x_QH, self._local_QK(packing, received_QW), groups.num_rows)
        return rows_RH, (x_QH, weight_QK, order)

    def pack_outputs(self, out_RH: torch.Tensor, stored: Stored, groups: Groups) -> torch.Tensor:
        _, weight_QK, order = stored
        return self.ops.unpermute(out_RH, order, weight_QK.to(self._sum_dtype).contiguous()).to(self.dtype)

    @property
    def _sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, self.weight_dtype)

    def sum_outputs(self, received_SH: torch.Tensor, order: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        out_TH = self.ops.permute_backward(received_SH.to(self._sum_dtype), order, self._slots)
        return out_TH.to(self.weight_dtype)

    def pack_grads(
        self,
        grad_TH: torch.Tensor,
        x_TH: torch.Tensor | None,
        route_TK: torch.Tensor | None,
        weight_TK: torch.Tensor,
        order: torch.Tensor,
        num_rows: int | None,
    ) -> torch.Tensor:
        if x_TH is None:
            packed_TW = self._out.pack(grad_TH)
        else:
            assert route_TK is not None  # kept with the input
            packed_TW = self._out.pack(grad_TH, x_TH)
            self._write_routing(self._out, packed_TW, route_TK, weight_TK)
        return self.ops.unpermute_backward(packed_TW, self.ops.pairs(order)[:num_rows], self._slots)

    def unpack_grads(self, received_QW: torch.Tensor, stored: Stored, groups: Groups) -> AtExperts:
        operand, grad_QH = self.ops.operand, self.ops.operand(received_QW[:, : self.hidden])
        if self._again:
            x_QH = operand(received_QW[:, self.hidden : 2 * self.hidden])
            weight_QK = self._out.array(received_QW, 1)
            grad_RH, order = self.ops.permute(grad_QH, self._local_QK(self._out, received_QW), groups.num_rows)
            pair_R = self.ops.pairs(order)[: groups.num_rows]
        else:
            x_QH, weight_QK, order = stored
            pair_R = self.ops.pairs(order)[: groups.num_rows]
            grad_RH = self.ops.unpermute_backward(grad_QH, pair_R, self.top_k)
        rows = functools.partial(self.ops.unpermute_backward, x_QH, pair_R, self.top_k)
        return AtExperts(grad_RH, self.ops.rows_of(weight_QK, pair_R), rows, (order,))

    def pack_input_grads(
        self,
        rows_grad: Callable[[torch.Tensor | None], torch.Tensor],
        weight_grad_R: torch.Tensor | None,
        back: Stored,
        groups: Groups,
    ) -> torch.Tensor:
        (order,) = back
        send_QW = self._back.empty(order.numel() // self.top_k, order)
        if weight_grad_R is not None:
            weight_grad_QK = weight_grad_R.new_zeros((len(send_QW), self.top_k))
            self.ops.rows_of_backward(weight_grad_R, order, weight_grad_QK)
            self._back.array(send_QW, 0).copy_(weight_grad_QK)
            del weight_grad_QK
        if self.needs.rows:
            send_QW[:, : self.hidden] = self.ops.permute_backward(rows_grad(None), order, self.top_k)
        return send_QW

    def sum_input_grads(
        self, received_SW: torch.Tensor, order: torch.Tensor, weight_grad_TK: torch.Tensor | None
    ) -> torch.Tensor | None:
        if weight_grad_TK is not None:
            # a choice has a gradient in the row of one rank, and zeros in the others
            weight_grad_SK = self._back.array(received_SW, 0).contiguous()
            weight_grad_TK.copy_(self.ops.permute_backward(weight_grad_SK, order, self._slots))
        if not self.needs.rows:
            return None
        return self.ops.permute_backward(received_SW, order, self._slots)[:, : self.hidden]


def make_dispatch(kind: str, arguments: Arguments, ops: BackEnd, keep: str) -> Dispatch:
    """The dispatch of a call; `keep` is that of `ChunkMoEConfig`."""
    return (PerRank if kind == PER_RANK else PerExpert)(
        ops,
        arguments.needs(),
        keep,
        hidden=arguments.x_TH.shape[1],
        top_k=arguments.selected_experts.shape[1],
        num_experts=arguments.num_experts,
        ranks=group_size(arguments.group),
        rank=group_rank(arguments.group),
        dtype=arguments.compute_dtype,
        weight_dtype=arguments.routing_weights.dtype,
    )
