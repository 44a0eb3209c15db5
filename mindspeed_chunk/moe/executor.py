"""One layer call, forward and backward: each runs a schedule from left to right, with one branch per kind of action.

Only this module owns buffers and work handles. A direction is a generator that pauses once, where one node of the
autograd graph ends and the next begins (`nodes.py`).

T tokens, H hidden, K experts per token, R rows at the experts, I expert intermediate, F output columns of fc1, L
experts here.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from mindspeed_chunk.dist import DONE, Work, all_to_all
from mindspeed_chunk.moe.activation import Activation
from mindspeed_chunk.moe.dispatch import Dispatch
from mindspeed_chunk.moe.experts import Experts, NeedsGrad, Totals, WeightOperands
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
        dispatch: what is sent to the experts and what comes back.
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
    dispatch: Dispatch
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
    route_TK: torch.Tensor
    weight_TK: torch.Tensor
    out_TH: torch.Tensor
    orders: list[torch.Tensor]
    kept: list[torch.Tensor]


def forward(
    call: Call, plan: PendingPlan, x_TH: torch.Tensor, route_TK: torch.Tensor, weight_TK: torch.Tensor
) -> Generator[None, Experts, Forwarded]:
    """Pauses after the launch of the first dispatch, and continues with the experts."""
    chunks, dispatch, experts = [_Chunk() for _ in call.tokens], call.dispatch, cast(Experts, None)
    rows_TH, target_TD = x_TH.to(call.compute_dtype), dispatch.targets(route_TK)
    # NaN if there is no output: if something reads it nevertheless, the loss is NaN
    out_TH = weight_TK.new_empty(x_TH.shape) if call.output else weight_TK.new_full(x_TH.shape, math.nan)
    result = Forwarded(x_TH, route_TK, weight_TK, out_TH, [], [])
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
                num_rows = plan.wait()[c].num_sent if plan.ready else None
                chunk.send, order = dispatch.pack_tokens(
                    rows_TH[tokens], route_TK[tokens], target_TD[tokens], weight_TK[tokens], num_rows
                )
                result.orders.append(order)
                del order
            elif kind == "D":
                chunk.dispatch(plan.wait()[c], call.group, str(action))
            elif kind == "E":
                groups_N = groups_N or plan.groups()
                # what is not kept is freed as early as possible, and nothing lives as long as the walk
                rows_RH, stored = dispatch.unpack_tokens(chunk.arrived(), groups_N[c])
                fc1_RF = experts.fc1(rows_RH, groups_N[c]) if call.output or keep == "activations" else None
                del rows_RH
                if keep in ("rows", "activations"):
                    result.kept += stored
                if keep == "activations":
                    result.kept.append(cast(torch.Tensor, fc1_RF))
                if call.output:
                    activated_RI = experts.activate(cast(torch.Tensor, fc1_RF), c)
                    del fc1_RF
                    out_RH = experts.fc2(activated_RI, groups_N[c])
                    del activated_RI
                    chunk.send = dispatch.pack_outputs(out_RH, stored, groups_N[c])
                    del out_RH
                else:
                    chunk.in_flight = False
                    del fc1_RF
                del stored
            elif kind == "C":
                chunk.combine(plan.wait()[c], call.group, str(action), dispatch)
            elif kind == "U":
                out_TH[tokens] = dispatch.sum_outputs(chunk.arrived(), result.orders[c], weight_TK[tokens])
    return result


def backward(
    call: Call,
    plan: PendingPlan,
    upstream_TH: torch.Tensor,
    weight_TK: torch.Tensor,
    experts: Experts,
    x_TH: torch.Tensor | None,
    route_TK: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    totals: Totals,
) -> Generator[None, None, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Pauses before it waits for the last combines. Then `totals` are complete, and only data of these is held.

    Args:
        upstream_TH: the gradient of the output.
        x_TH, route_TK: the input, if only that was kept, and its routes, if `dispatch` sends them.
        saved: the order of each chunk's rows, then what was kept for the chunks.

    Returns:
        The gradients of the tokens and of the router weights, each None if it is not needed.
    """
    chunks, dispatch, needs, shape = [_Chunk() for _ in call.tokens], call.dispatch, call.needs, upstream_TH.shape
    orders, kept = saved[: len(chunks)], saved[len(chunks) :]
    per_chunk = len(kept) // len(chunks)
    del saved
    x_grad_TH: torch.Tensor | None = None  # made when its first part has arrived
    weight_grad_TK = weight_TK.new_empty(weight_TK.shape) if needs.weights else None
    groups_N: tuple[Groups, ...] = ()
    for action in call.backward_actions():
        if action is None:
            del upstream_TH, weight_TK, experts, x_TH, route_TK, kept, totals, groups_N
            with _paused(chunks):
                yield
            continue
        kind, c = action
        chunk, tokens = chunks[c], call.tokens[c]
        with _recorded(action, chunks):
            if kind == "P":
                x_chunk = None if x_TH is None else x_TH[tokens]
                route_chunk = None if route_TK is None else route_TK[tokens]
                chunk.send = dispatch.pack_grads(
                    upstream_TH[tokens], x_chunk, route_chunk, weight_TK[tokens], orders[c], plan.wait()[c].num_sent
                )
                del x_chunk, route_chunk
            elif kind == "D":
                chunk.dispatch(plan.wait()[c], call.group, str(action))
            elif kind == "E":
                groups_N = groups_N or plan.groups()
                stored, fc1_RF = list(kept[c * per_chunk : (c + 1) * per_chunk]), None
                if call.keep == "activations":
                    fc1_RF = stored.pop()
                arrived = dispatch.unpack_grads(chunk.arrived(), stored, groups_N[c])
                chunk.operands, weight_grad_R = experts.input_grad(
                    arrived, fc1_RF, groups_N[c], c, needs, totals.activation
                )
                back = arrived.back
                del stored, fc1_RF, arrived
                if needs.input:
                    rows_grad = functools.partial(experts.rows_grad, chunk.operands)
                    chunk.send = dispatch.pack_input_grads(rows_grad, weight_grad_R, back, groups_N[c])
                    del rows_grad
                else:
                    chunk.in_flight = False
                del back, weight_grad_R
                if not needs.experts:
                    chunk.operands = None
                elif call.keep == "input":
                    # this mode is for memory: the larger half of the operands is freed before rows return
                    chunk.operands = experts.weight_grad(chunk.operands, totals.fc1_LHF, None)
            elif kind == "C":
                chunk.combine(plan.wait()[c], call.group, str(action), dispatch)
            elif kind == "W":
                assert chunk.operands is not None  # E before W
                fc1_total_LHF = None if call.keep == "input" else totals.fc1_LHF
                experts.weight_grad(chunk.operands, fc1_total_LHF, totals.fc2_LIH)
                chunk.operands = None
                del fc1_total_LHF
            elif kind == "U":
                weight_out = None if weight_grad_TK is None else weight_grad_TK[tokens]
                grad_TH = dispatch.sum_input_grads(chunk.arrived(), orders[c], weight_out)
                if grad_TH is not None:
                    if x_grad_TH is None:
                        x_grad_TH = grad_TH.new_empty(shape)
                    x_grad_TH[tokens] = grad_TH
                del grad_TH, weight_out
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

    def combine(self, plan: ChunkPlan, group: dist.ProcessGroup | None, name: str, dispatch: Dispatch) -> None:
        """Launch the all-to-all back."""
        assert self.send is not None  # E before C
        self.received, self.work = all_to_all(
            self.send, plan.recv_splits, plan.send_splits, group, name, dispatch.padding_rows(plan), plan.max_split
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
