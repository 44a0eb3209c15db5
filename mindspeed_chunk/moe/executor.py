"""Walks a schedule over one layer call, forward and backward: the only owner of buffers and work handles.

A walk has two parts, for the two nodes that it runs behind (`nodes.py`).

T tokens, H hidden, K experts a token, R rows routed, I expert intermediate, F what fc1 puts out, L experts here, W the
width of a packed row (`packing.py`).
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from mindspeed_chunk.dist import DONE, Work, all_to_all
from mindspeed_chunk.moe.activation import CustomActivation, SwiGLU
from mindspeed_chunk.moe.experts import Experts, Needs, WeightOperands
from mindspeed_chunk.moe.packing import packed_width, tail
from mindspeed_chunk.moe.plan import ChunkPlan, PendingPlan
from mindspeed_chunk.moe.schedule import Action, Schedule, after_first_dispatch, before_last_unpermutes, build
from mindspeed_chunk.observe import emit, listening


@dataclass(frozen=True)
class Call:
    """What one layer call is told beside its tensors. Holds none of its own, so the backward may keep it.

    Attributes:
        schedule, lookahead: which schedule, forward and backward; see `schedule.build`.
        tokens: each chunk's slice of the tokens.
        compute_dtype: of the rows and the expert matmuls; differs from the inputs' under autocast only.
        transposed: the weights are `[L, F, H]` and `[L, H, I]`.
        keep: what the backward finds: see `ChunkMoEConfig.chunk_moe_keep`.
        output: False in a recompute whose output nobody reads: only what is kept is made again.
    """

    schedule: str
    lookahead: int
    tokens: tuple[slice, ...]
    group: dist.ProcessGroup | None
    ops: types.ModuleType
    activation: SwiGLU | CustomActivation
    needs: Needs
    compute_dtype: torch.dtype
    transposed: bool
    keep: str
    output: bool

    def experts(self, fc1: torch.Tensor, fc2: torch.Tensor) -> Experts:
        fc1_LHF, fc2_LIH = (self.as_rows_times(weight.to(self.compute_dtype)) for weight in (fc1, fc2))
        return Experts(self.ops, self.activation, fc1_LHF, fc2_LIH)

    def as_rows_times(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight, or the total of its gradient, in the layout that rows are multiplied with from the left."""
        return weight.transpose(1, 2) if self.transposed else weight


@dataclass
class _Chunk:
    """What one chunk owns between its first action and its last.

    Attributes:
        send: rows to be sent, or on the wire: not to be written or freed until the wait on `work`.
        received: where the rows on the wire arrive: not to be read until that wait.
        operands: what the weight gradients wait for.
        in_flight: dispatched, and its combine not launched.
    """

    send: torch.Tensor | None = None
    received: torch.Tensor | None = None
    work: Work = DONE
    operands: WeightOperands | None = None
    in_flight: bool = False

    def arrived(self) -> torch.Tensor:
        """Wait for the rows on the wire. The send buffer goes; the received rows become the caller's."""
        self.work.wait()
        received = cast(torch.Tensor, self.received)  # a walk that is abandoned may have none, and does not look at it
        self.work, self.send, self.received = DONE, None, None
        return received

    def owns_buffers(self) -> bool:
        return any(owned is not None for owned in (self.send, self.received, self.operands))


_METHODS = {
    "P": "permute",
    "D": "dispatch",
    "E": "experts",
    "C": "combine",
    "W": "weight_grad",
    "U": "unpermute",
}


class _Walk:
    """A schedule walked from left to right, in two parts; a subclass has the method of each kind of action."""

    def __init__(self, call: Call, plan: PendingPlan, top_k: int, *, backward: bool) -> None:
        self._call, self._plan, self._top_k = call, plan, top_k
        self._chunks = [_Chunk() for _ in call.tokens]
        if backward:
            drop = ("" if call.needs.input else "CU") + ("" if call.needs.experts else "W")
        elif call.output:
            drop = ""
        else:
            drop = "DECU" if call.keep == "input" else "CU"
        schedule = build(call.schedule, len(call.tokens), lookahead=call.lookahead, backward=backward, drop=drop)
        cut = before_last_unpermutes(schedule) if backward else after_first_dispatch(schedule)
        self._first, self._rest = schedule[:cut], schedule[cut:]

    def start(self) -> None:
        """Forward: launch the first dispatch. Backward: all but the wait for the last combine."""
        self._run(self._first)

    def finish(self) -> None:
        rest, self._rest = self._rest, ()
        self._run(rest)

    def abandon(self) -> None:
        for chunk in self._chunks:
            chunk.arrived()

    def _run(self, actions: Schedule) -> None:
        for action in actions:
            with _profiled(action):
                getattr(self, _METHODS[action.kind])(action.chunk)
            if listening():
                in_flight = sum(chunk.in_flight for chunk in self._chunks)
                owners = sum(chunk.owns_buffers() for chunk in self._chunks)
                emit("action", str(action), in_flight=in_flight, owners=owners)

    def _chunk_plan(self, c: int) -> ChunkPlan:
        # waits for the host copy the first time: whatever was queued until then did not need it
        return self._plan.wait()[c]

    def dispatch(self, c: int) -> None:
        plan, chunk = self._chunk_plan(c), self._chunks[c]
        assert chunk.send is not None  # P stands before D in every schedule
        # rows of padded tokens stand last and are not sent
        chunk.send = chunk.send[: plan.num_sent]
        chunk.received, chunk.work = all_to_all(
            chunk.send, plan.send_splits, plan.recv_splits, self._call.group, f"D{c}", most=plan.most
        )
        chunk.in_flight = True

    def combine(self, c: int) -> None:
        plan, chunk = self._chunk_plan(c), self._chunks[c]
        num_rows = plan.num_tokens * self._top_k  # zeros where nothing was sent
        not_sent = num_rows - plan.num_sent
        assert chunk.send is not None  # E before C
        chunk.received, chunk.work = all_to_all(
            chunk.send, plan.recv_splits, plan.send_splits, self._call.group, f"C{c}", not_sent, plan.most
        )
        chunk.in_flight = False


class Forward(_Walk):
    def __init__(
        self,
        call: Call,
        plan: PendingPlan,
        x_TH: torch.Tensor,
        route_TK: torch.Tensor,
        weight_TK: torch.Tensor,
    ) -> None:
        super().__init__(call, plan, weight_TK.shape[1], backward=False)
        self.x_TH, self.weight_TK = x_TH, weight_TK
        self._rows_TH, self._route_TK = x_TH.to(call.compute_dtype), route_TK
        self._experts: Experts
        self.orders: list[torch.Tensor] = []
        # NaN where there is no output: whoever reads it against all expectation shall see it
        self.out_TH = weight_TK.new_empty(x_TH.shape) if call.output else weight_TK.new_full(x_TH.shape, math.nan)
        self.saved: list[torch.Tensor] = []

    def finish_with(self, experts: Experts) -> None:
        self._experts = experts
        self.finish()

    def permute(self, c: int) -> None:
        tokens = self._call.tokens[c]
        self._chunks[c].send, order_R = self._call.ops.permute(self._rows_TH[tokens], self._route_TK[tokens])
        self.orders.append(order_R)

    def experts(self, c: int) -> None:
        plan, chunk, ops = self._chunk_plan(c), self._chunks[c], self._call.ops
        keep = self._call.keep if self._call.needs.any else "nothing"
        rows_RH = ops.regroup(chunk.arrived(), plan.groups)
        if self._call.output:
            chunk.send, fc1_RF = self._experts.forward(rows_RH, plan.groups, c, keep_fc1=keep == "activations")
        else:
            chunk.in_flight = False
            fc1_RF = self._experts.fc1(rows_RH, plan.groups) if keep == "activations" else None
        self.saved += {"nothing": (), "input": (), "rows": (rows_RH,), "activations": (rows_RH, fc1_RF)}[keep]

    def unpermute(self, c: int) -> None:
        tokens, received_RH = self._call.tokens[c], self._chunks[c].arrived()
        self.out_TH[tokens] = self._call.ops.unpermute(received_RH, self.orders[c], self.weight_TK[tokens])


class Backward(_Walk):
    """What travels to the experts is one packed row for each routed one: the gradient of the token's output, the token
    itself where only the input was kept, and the router weight.
    """

    def __init__(
        self,
        call: Call,
        plan: PendingPlan,
        grad_TH: torch.Tensor,
        weight_TK: torch.Tensor,
        fc1: torch.Tensor,
        fc2: torch.Tensor,
        x_TH: torch.Tensor | None,
        saved: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(call, plan, weight_TK.shape[1], backward=True)
        needs, self._grad_TH, self._weight_TK, self._x_TH = call.needs, grad_TH, weight_TK, x_TH
        self._orders, self._kept = saved[: len(call.tokens)], saved[len(call.tokens) :]
        self._shape, self._hidden = grad_TH.shape, grad_TH.shape[1]
        self._out_hidden = self._hidden * (1 if x_TH is None else 2)
        self._back_hidden = self._hidden if needs.rows else 0
        self._experts = call.experts(fc1, fc2)
        self.x_grad_TH: torch.Tensor | None = None  # made when the first part of it has come
        self.weight_grad_TK = weight_TK.new_empty(weight_TK.shape) if needs.weights else None
        self.fc1_total = _total(fc1) if needs.fc1 else None
        self.fc2_total = _total(fc2) if needs.fc2 else None
        self._fc1_total_LHF, self._fc2_total_LIH = (
            None if total is None else call.as_rows_times(total) for total in (self.fc1_total, self.fc2_total)
        )
        self.activation_totals = [_total(parameter) for parameter in call.activation.parameters]

    def permute(self, c: int) -> None:
        tokens, order_R = self._call.tokens[c], self._orders[c]
        grad_TH = self._grad_TH[tokens]
        width = packed_width(self._out_hidden, self._call.compute_dtype)
        packed_TW = grad_TH.new_empty((grad_TH.shape[0], width), dtype=self._call.compute_dtype)
        packed_TW[:, : self._hidden] = grad_TH
        if self._x_TH is not None:
            packed_TW[:, self._hidden : self._out_hidden] = self._x_TH[tokens]
        packed_RW = self._call.ops.unpermute_backward(packed_TW, order_R, self._top_k)
        weight_R = self._call.ops.rows_of(self._weight_TK[tokens], order_R)
        tail(packed_RW, self._out_hidden, self._weight_TK.dtype).copy_(weight_R)
        self._chunks[c].send = packed_RW

    def experts(self, c: int) -> None:
        plan, chunk, call = self._chunk_plan(c), self._chunks[c], self._call
        packed_RW = call.ops.regroup(chunk.arrived(), plan.groups)
        rows_RH, fc1_RF = self._kept_of(c, packed_RW)
        chunk.operands, weight_grad_R = self._experts.input_grad(
            packed_RW[:, : self._hidden],
            tail(packed_RW, self._out_hidden, self._weight_TK.dtype),
            rows_RH,
            fc1_RF,
            plan.groups,
            c,
            call.needs,
            self.activation_totals,
        )
        if call.needs.input:
            back_RW = packed_RW.new_empty((packed_RW.shape[0], packed_width(self._back_hidden, packed_RW.dtype)))
            if call.needs.weights:
                weight_grad_R = call.ops.regroup_backward(weight_grad_R, plan.groups)
                tail(back_RW, self._back_hidden, self._weight_TK.dtype).copy_(weight_grad_R)
            if call.needs.rows:
                self._experts.rows_grad(chunk.operands, back_RW[:, : self._back_hidden])
            chunk.send = back_RW
        else:
            chunk.in_flight = False
        if not call.needs.experts:
            chunk.operands = None
        elif call.keep == "input":
            # memory is what this mode is for: the larger half of the operands goes before rows come back
            chunk.operands = self._experts.weight_grad(chunk.operands, self._fc1_total_LHF, None)

    def weight_grad(self, c: int) -> None:
        chunk = self._chunks[c]
        fc1_total_LHF = None if self._call.keep == "input" else self._fc1_total_LHF
        assert chunk.operands is not None  # E before W
        self._experts.weight_grad(chunk.operands, fc1_total_LHF, self._fc2_total_LIH)
        chunk.operands = None

    def unpermute(self, c: int) -> None:
        tokens, received_RW, order_R = self._call.tokens[c], self._chunks[c].arrived(), self._orders[c]
        if self._call.needs.rows:
            grad_TW = self._call.ops.permute_backward(received_RW, order_R, self._top_k)
            if self.x_grad_TH is None:
                self.x_grad_TH = grad_TW.new_empty(self._shape)
            self.x_grad_TH[tokens] = grad_TW[:, : self._hidden]
        if self.weight_grad_TK is not None:
            weight_grad_R = tail(received_RW, self._back_hidden, self._weight_TK.dtype)
            self._call.ops.rows_of_backward(weight_grad_R, order_R, self.weight_grad_TK[tokens])

    def keep_what_is_left(self) -> None:
        """Let go of all that the last unpermutes do not read, weights and their gradients first of all."""
        del self._experts, self.fc1_total, self.fc2_total, self._fc1_total_LHF, self._fc2_total_LIH
        del self._kept, self.activation_totals, self._x_TH, self._grad_TH

    def _kept_of(self, c: int, packed_RW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows at the experts, and fc1's output if it was kept."""
        if self._call.keep == "input":
            return packed_RW[:, self._hidden : self._out_hidden], None
        if self._call.keep == "rows":
            return self._kept[c], None
        return self._kept[2 * c], self._kept[2 * c + 1]


def _total(weight: torch.Tensor) -> torch.Tensor:
    """Zeros to sum a weight's or a parameter's gradient in, over all chunks: fp32 for a narrower one."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return torch.zeros(weight.shape, dtype=torch.float32 if narrow else weight.dtype, device=weight.device)


def _profiled(action: Action) -> contextlib.AbstractContextManager:
    """A profiler range named like the action, while a profiler runs."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"chunkmoe::{action}")
    return contextlib.nullcontext()
