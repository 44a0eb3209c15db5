"""One layer call, forward and backward: each runs a schedule from left to right, with one branch per kind of action.

Only this module owns buffers and work handles. A direction is a generator that pauses once, where one node of the
autograd graph ends and the next begins (`nodes.py`).

T tokens, H hidden, K experts per token, R rows routed, I expert intermediate, F output columns of fc1, L experts here,
W the width of a packed row (`packing.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from mindspeed_chunk.dist import DONE, Work, all_to_all
from mindspeed_chunk.moe.activation import Activation
from mindspeed_chunk.moe.experts import Experts, NeedsGrad, Totals, WeightOperands
from mindspeed_chunk.moe.packing import pack, packed_weight, packed_width
from mindspeed_chunk.moe.plan import ChunkPlan, PendingPlan
from mindspeed_chunk.moe.schedule import Action, after_first_dispatch, before_last_unpermutes, build
from mindspeed_chunk.observe import emit, listening
from mindspeed_chunk.ops import BackEnd
from mindspeed_chunk.ops.groups import Groups

Result = TypeVar("Result")


@dataclass(frozen=True)
class Call:
    """The settings of one layer call. Holds no tensor of the call, so the backward may keep it.

    Attributes:
        schedule, lookahead: which schedule, forward and backward; see `schedule.build`.
        tokens: each chunk's slice of the tokens.
        compute_dtype: of the rows and the expert matmuls; differs from the inputs' dtype only under autocast.
        transposed: the weights are `[L, F, H]` and `[L, H, I]`.
        keep: what is kept for the backward: see `ChunkMoEConfig.chunk_moe_keep`.
        output: False in a recompute whose output is not read: it computes only what is kept.
    """

    schedule: str
    lookahead: int
    tokens: tuple[slice, ...]
    group: dist.ProcessGroup | None
    ops: BackEnd
    activation: Activation
    needs: NeedsGrad
    compute_dtype: torch.dtype
    transposed: bool
    keep: str
    output: bool

    def experts(self, fc1: torch.Tensor, fc2: torch.Tensor) -> Experts:
        return Experts(
            self.ops, self.activation, fc1.to(self.compute_dtype), fc2.to(self.compute_dtype), self.transposed
        )

    def forward_actions(self) -> tuple[Action | None, ...]:
        """The schedule; None for the pause, after the first dispatch."""
        drop = "" if self.output else "DECU" if self.keep == "input" else "CU"
        schedule = build(self.schedule, len(self.tokens), lookahead=self.lookahead, drop=drop)
        pause = after_first_dispatch(schedule)
        return (*schedule[:pause], None, *schedule[pause:])

    def backward_actions(self) -> tuple[Action | None, ...]:
        """The schedule; None for the pause, before the actions that only wait for the last combines."""
        drop = ("" if self.needs.input else "CU") + ("" if self.needs.experts else "W")
        schedule = build(self.schedule, len(self.tokens), lookahead=self.lookahead, backward=True, drop=drop)
        pause = before_last_unpermutes(schedule)
        return (*schedule[:pause], None, *schedule[pause:])


class Walk(Generic[Result]):
    """A generator that pauses once. The constructor runs it up to the pause, and `finish` to its end."""

    def __init__(self, generator: Generator[None, Any, Result]) -> None:
        self._generator = generator
        self._results: list[Result] = []
        next(generator)

    def finish(self, value: object = None) -> Result:
        """Continue with `value`. Returns the generator's result; after the end, the same result again."""
        if not self._results:
            try:
                self._generator.send(value)
            except StopIteration as end:
                self._results.append(end.value)
        return self._results[0]

    def abandon(self) -> None:
        """Give up: wait for the exchanges in flight before their buffers are freed."""
        self._generator.close()


@dataclass
class Forwarded:
    """The result of a forward: the output, and the data for a backward.

    Attributes:
        out_TH: in the dtype of the router weights; NaN if the call has no output.
        orders: the order of each chunk's rows.
        kept: what `Call.keep` says, chunk by chunk.
    """

    x_TH: torch.Tensor
    weight_TK: torch.Tensor
    out_TH: torch.Tensor
    orders: list[torch.Tensor]
    kept: list[torch.Tensor | None]


def forward(
    call: Call, plan: PendingPlan, x_TH: torch.Tensor, route_TK: torch.Tensor, weight_TK: torch.Tensor
) -> Generator[None, Experts, Forwarded]:
    """Pauses after the launch of the first dispatch, and continues with the experts."""
    chunks, ops, experts = [_Chunk() for _ in call.tokens], call.ops, cast(Experts, None)
    rows_TH = x_TH.to(call.compute_dtype)
    # NaN if there is no output, so that an unexpected reader shows
    out_TH = weight_TK.new_empty(x_TH.shape) if call.output else weight_TK.new_full(x_TH.shape, math.nan)
    result = Forwarded(x_TH, weight_TK, out_TH, [], [])
    keep = call.keep if call.needs.any else "nothing"
    groups_N: tuple[Groups, ...] = ()  # made after the wait for the plan
    for action in call.forward_actions():
        if action is None:
            with _paused(chunks):
                experts = yield
            continue
        kind, c = action
        chunk, tokens = chunks[c], call.tokens[c]
        with _recorded(action, chunks):
            if kind == "P":
                chunk.send, order_R = ops.permute(rows_TH[tokens], route_TK[tokens])
                result.orders.append(order_R)
            elif kind == "D":
                chunk.dispatch(plan.wait()[c], call.group, str(action))
            elif kind == "E":
                groups_N = groups_N or plan.groups()
                groups = groups_N[c]
                rows_RH, fc1_RF = ops.regroup(chunk.arrived(), groups), None
                if call.output:
                    chunk.send, fc1_RF = experts.forward(rows_RH, groups, c, keep_fc1=keep == "activations")
                else:
                    chunk.in_flight = False
                    fc1_RF = experts.fc1(rows_RH, groups) if keep == "activations" else None
                result.kept += {"nothing": (), "input": (), "rows": (rows_RH,), "activations": (rows_RH, fc1_RF)}[keep]
                del rows_RH, fc1_RF  # otherwise they would live as long as the walk
            elif kind == "C":
                chunk.combine(plan.wait()[c], call.group, str(action), weight_TK.shape[1])
            elif kind == "U":
                out_TH[tokens] = ops.unpermute(chunk.arrived(), result.orders[c], weight_TK[tokens])
    return result


def backward(
    call: Call,
    plan: PendingPlan,
    grad_TH: torch.Tensor,
    weight_TK: torch.Tensor,
    experts: Experts,
    x_TH: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    totals: Totals,
) -> Generator[None, None, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Pauses before it waits for the last combines. Then `totals` are complete, and only data for these is still held.

    One packed row per routed row is sent to the experts: the gradient of the token's output, the token itself if only
    the input was kept, and the router weight.

    Args:
        x_TH: the input, if only that was kept.
        saved: the order of each chunk's rows, then what was kept for the chunks.

    Returns:
        The gradients of the tokens and of the router weights, each None if it is not needed.
    """
    chunks, ops, needs = [_Chunk() for _ in call.tokens], call.ops, call.needs
    shape, hidden, top_k, weight_dtype = grad_TH.shape, grad_TH.shape[1], weight_TK.shape[1], weight_TK.dtype
    out_hidden, back_hidden = hidden * (1 if x_TH is None else 2), hidden if needs.rows else 0
    orders, kept = saved[: len(chunks)], saved[len(chunks) :]
    del saved
    x_grad_TH: torch.Tensor | None = None  # made when its first part has arrived
    weight_grad_TK = weight_TK.new_empty(weight_TK.shape) if needs.weights else None
    groups_N: tuple[Groups, ...] = ()
    for action in call.backward_actions():
        if action is None:
            del grad_TH, weight_TK, experts, x_TH, kept, totals, groups_N
            with _paused(chunks):
                yield
            continue
        kind, c = action
        chunk, tokens = chunks[c], call.tokens[c]
        with _recorded(action, chunks):
            if kind == "P":
                parts = [grad_TH[tokens]] if x_TH is None else [grad_TH[tokens], x_TH[tokens]]
                packed_TW = pack(parts, call.compute_dtype)
                pair_R = ops.pairs(orders[c])
                chunk.send = ops.unpermute_backward(packed_TW, pair_R, top_k)
                packed_weight(chunk.send, out_hidden, weight_dtype).copy_(ops.rows_of(weight_TK[tokens], pair_R))
                del parts, packed_TW, pair_R
            elif kind == "D":
                chunk.dispatch(plan.wait()[c], call.group, str(action))
            elif kind == "E":
                groups_N = groups_N or plan.groups()
                groups = groups_N[c]
                packed_RW = ops.regroup(chunk.arrived(), groups)
                if call.keep == "input":
                    rows_RH, fc1_RF = ops.operand(packed_RW[:, hidden:out_hidden]), None
                elif call.keep == "rows":
                    rows_RH, fc1_RF = kept[c], None
                else:
                    rows_RH, fc1_RF = kept[2 * c : 2 * c + 2]
                grad_RH = ops.operand(packed_RW[:, :hidden])
                weight_R = ops.operand(packed_weight(packed_RW, out_hidden, weight_dtype))
                del packed_RW  # operands need not be views of it
                chunk.operands, weight_grad_R = experts.input_grad(
                    grad_RH, weight_R, rows_RH, fc1_RF, groups, c, needs, totals.activation
                )
                del rows_RH, fc1_RF
                if needs.input:
                    chunk.send = grad_RH.new_empty((len(grad_RH), packed_width(back_hidden, grad_RH.dtype)))
                    if weight_grad_R is not None:
                        weight_grad_R = ops.regroup_backward(weight_grad_R, groups)
                        packed_weight(chunk.send, back_hidden, weight_dtype).copy_(weight_grad_R)
                    if needs.rows:
                        experts.rows_grad(chunk.operands, chunk.send[:, :back_hidden])
                else:
                    chunk.in_flight = False
                del grad_RH, weight_R, weight_grad_R
                if not needs.experts:
                    chunk.operands = None
                elif call.keep == "input":
                    # this mode is for memory: the larger half of the operands is freed before rows return
                    chunk.operands = experts.weight_grad(chunk.operands, totals.fc1_LHF, None)
            elif kind == "C":
                chunk.combine(plan.wait()[c], call.group, str(action), top_k)
            elif kind == "W":
                assert chunk.operands is not None  # E before W
                fc1_total_LHF = None if call.keep == "input" else totals.fc1_LHF
                experts.weight_grad(chunk.operands, fc1_total_LHF, totals.fc2_LIH)
                chunk.operands = None
                del fc1_total_LHF
            elif kind == "U":
                received_RW = chunk.arrived()
                if needs.rows:
                    grad_TW = ops.permute_backward(received_RW, orders[c], top_k)
                    if x_grad_TH is None:
                        x_grad_TH = grad_TW.new_empty(shape)
                    x_grad_TH[tokens] = grad_TW[:, :hidden]
                    del grad_TW
                if weight_grad_TK is not None:
                    weight_grad_R = packed_weight(received_RW, back_hidden, weight_dtype)
                    ops.rows_of_backward(weight_grad_R, orders[c], weight_grad_TK[tokens])
                    del weight_grad_R
                del received_RW
    return x_grad_TH, weight_grad_TK


@dataclass
class _Chunk:
    """The data of one chunk between its first action and its last.

    Attributes:
        send: rows to be sent or being sent: not to be written or freed until the wait for `work`.
        received: the buffer in which rows arrive: not to be read until that wait.
        operands: the operands of the weight gradients.
        in_flight: dispatched, but its combine is not launched yet.
    """

    send: torch.Tensor | None = None
    received: torch.Tensor | None = None
    work: Work = DONE
    operands: WeightOperands | None = None
    in_flight: bool = False

    def dispatch(self, plan: ChunkPlan, group: dist.ProcessGroup | None, name: str) -> None:
        """Launch the all-to-all towards the experts."""
        assert self.send is not None  # P before D
        # rows of padded tokens are last and are not sent
        self.send = self.send[: plan.num_sent]
        self.received, self.work = all_to_all(
            self.send, plan.send_splits, plan.recv_splits, group, name, max_split=plan.max_split
        )
        self.in_flight = True

    def combine(self, plan: ChunkPlan, group: dist.ProcessGroup | None, name: str, top_k: int) -> None:
        """Launch the all-to-all back."""
        assert self.send is not None  # E before C
        not_sent = plan.num_tokens * top_k - plan.num_sent  # zeros there
        self.received, self.work = all_to_all(
            self.send, plan.recv_splits, plan.send_splits, group, name, not_sent, plan.max_split
        )
        self.in_flight = False

    def arrived(self) -> torch.Tensor:
        """Wait for the exchange. The send buffer is freed; the caller owns the received rows."""
        self.work.wait()
        received = cast(torch.Tensor, self.received)  # an abandoned walk may have none, and does not use it
        self.work, self.send, self.received = DONE, None, None
        return received

    def owns_buffers(self) -> bool:
        return any(owned is not None for owned in (self.send, self.received, self.operands))


@contextlib.contextmanager
def _paused(chunks: list[_Chunk]) -> Iterator[None]:
    """Around a pause: if the walk ends there, exchanges in flight must end before their buffers are freed."""
    try:
        yield
    except GeneratorExit:
        for chunk in chunks:
            chunk.arrived()
        raise


@contextlib.contextmanager
def _recorded(action: Action, chunks: list[_Chunk]) -> Iterator[None]:
    """Around an action: a profiler range with its name, and an event with what the chunks own after it."""
    profiled = torch.autograd._profiler_enabled()
    with torch.profiler.record_function(f"chunkmoe::{action}") if profiled else contextlib.nullcontext():
        yield
    if listening():
        in_flight = sum(chunk.in_flight for chunk in chunks)
        owners = sum(chunk.owns_buffers() for chunk in chunks)
        emit("action", str(action), in_flight=in_flight, owners=owners)
