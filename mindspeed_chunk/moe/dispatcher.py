"""From the host's `ep_forward` arguments to the output tensor: checks, agreement, plan, then the executor.

T tokens here, H hidden, K experts per token, E experts, L = E / ep experts here, I expert intermediate, F output
columns of fc1.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_chunk import ops
from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.device import untraced
from mindspeed_chunk.dist import agree, group_size
from mindspeed_chunk.log import Rarely, say, say_once
from mindspeed_chunk.moe.activation import Activation, CustomActivation, SwiGLU
from mindspeed_chunk.moe.agreement import Agreement, settings_of
from mindspeed_chunk.moe.arguments import WEIGHT_LAYOUTS, Arguments
from mindspeed_chunk.moe.auto import NumChunks
from mindspeed_chunk.moe.costs.rows import PER_EXPERT, PER_RANK
from mindspeed_chunk.moe.dispatch import choose_dispatch, make_dispatch
from mindspeed_chunk.moe.draws import Draws
from mindspeed_chunk.moe.executor import Call
from mindspeed_chunk.moe.filler import run_filler
from mindspeed_chunk.moe.nodes import Close, Open, Opened
from mindspeed_chunk.moe.plan import (
    ChunkSlices,
    Columns,
    Gather,
    PendingPlan,
    agree_num_chunks,
    merge_slices,
    route,
)
from mindspeed_chunk.moe.replay import backward_follows, read_tape, record, refuse_unreplayed, reroute
from mindspeed_chunk.observe import emit

__all__ = ["ChunkMoEDispatcher"]


class Dispatcher(ABC):
    """Callable as MindSpeed-MM's `ep_forward`; a subclass computes the output in `_call`.

    Args:
        weight_layout: "LHF" for fc1 `[L, H, F]` and fc2 `[L, I, H]`, as in MindSpeed-MM; "LFH" for `[L, F, H]` and
            `[L, H, I]`, as in transformers. Never guessed from shapes.
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
        """Send every token to its experts and return the weighted sum of their outputs.

        Args:
            num_experts: E, over all ranks.
            routing_weights: `[T, K]`, or `[T, E]` to be gathered by `selected_experts` (if K = E: the former, as in
                the host). Floating point.
            selected_experts: `[T, K]`, integers in [0, E).
            hidden_states: `[..., H]`, flattened to `[T, H]`. T may differ from rank to rank and from call to call.
            fc1_weight, fc2_weight: weights of the local experts, in the constructor's layout and the dtype of the rows.
            ep_group: the expert-parallel ranks; None if all experts are here.
            fused: accepted because the host passes it. The back end decides which kernels run (`chunk_moe_backend`).
            swiglu_limit: if positive, SwiGLU's inputs are clamped to it.
            ep_balance_strategy: must be None.
            skip_moe_pad_tokens: tokens whose `seq_mask` is 0 are not sent and are returned unchanged.
            seq_mask: T values, 0 for padding.
            activation: instead of SwiGLU; rows `[n, F]` to `[n, I]`, each row independently.

        Returns:
            `[T, H]`, in the dtype of `routing_weights` (of `hidden_states` with `skip_moe_pad_tokens`).

        Raises:
            ValueError: on every rank, before any row is sent: for arguments that do not fit each other, E not divisible
                by the group's size, expert ids out of range, or ranks with different settings. Only one case is not
                detected: an E that changes after the first call, and only on some ranks.
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


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """The decisions of a layer call in its forward, which its recomputes use again.

    Attributes:
        plan: the rows of every chunk.
        tokens: each chunk's slice of the tokens.
        route_TK: see `plan.route`.
        dispatch: "per_expert" or "per_rank".
        draws: random draws of the activation, recorded while the forward runs.
        grad: the forward ran with gradients, so the ranks have compared which ones they need.
    """

    plan: PendingPlan
    tokens: tuple[slice, ...]
    route_TK: torch.Tensor
    dispatch: str
    draws: Draws
    grad: bool


class ChunkMoEDispatcher(Dispatcher):
    """Chunk MoE behind MindSpeed-MM's `ep_forward` arguments.

    Args:
        config: the settings, the same on every rank of the group.
        weight_layout: see `Dispatcher`.
    """

    def __init__(self, config: ChunkMoEConfig, *, weight_layout: str = "LHF") -> None:
        super().__init__(weight_layout=weight_layout)
        self.config = config
        self._agreement = Agreement()
        # modules that were tested as activations, with their widths and dtypes
        self._probed: weakref.WeakKeyDictionary[nn.Module, set[tuple]] = weakref.WeakKeyDictionary()
        self._num_chunks = NumChunks(config)
        # how many router choices recomputes replaced since the last plan, int64 [1], and how often this happened
        self._rerouted: torch.Tensor | None = None
        self._times_rerouted = Rarely()

    def __getstate__(self) -> dict:
        """For copies and pickles: agreements and tests of this process are not valid elsewhere."""
        return {"config": self.config, "weight_layout": self.weight_layout}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy is made like a new one

    def _call(self, arguments: Arguments) -> torch.Tensor:
        recorded = read_tape()
        if recorded is None:
            refuse_unreplayed()
            planned = self._plan(arguments)
            out_TH = self._run(arguments, planned, output=True)
            record(planned, out_TH, follow=self.config.chunk_moe_skip_unread)
            return out_TH
        kept: PlannedCall = recorded.entry
        if torch.is_grad_enabled() and not kept.grad:
            # after the forward of a reentrant checkpoint: only now it is known which gradients are needed
            self._agreement.reach("recompute", arguments, self._settings(arguments), None)
        planned = dataclasses.replace(kept, route_TK=self._reroute(arguments, kept.route_TK))
        return self._run(arguments, planned, output=recorded.output_needed)

    def _reroute(self, arguments: Arguments, kept_TK: torch.Tensor) -> torch.Tensor:
        """The routes of a recompute. Changed choices are counted on the device; the next plan returns the count.

        Router weights `[T, K]` are in the order of the recompute's choices, so the kept experts get these positions.
        Dense weights are gathered by the routes, so the forward's routes are used as they are.
        """
        route_TK = route(arguments.selected_experts, arguments.num_experts, arguments.pad_T())
        if route_TK.shape != kept_TK.shape:
            raise RuntimeError(
                f"a recompute routes {tuple(route_TK.shape)} (tokens, experts per token), its forward routed "
                f"{tuple(kept_TK.shape)}: the calls of one checkpoint must come in the same order"
            )
        route_TK, changed = reroute(route_TK, kept_TK)
        self._rerouted = changed if self._rerouted is None else self._rerouted + changed
        return kept_TK if arguments.dense_weights else route_TK

    def _warn_of_empty_chunks(self, num_tokens: int) -> None:
        """Each chunk has its collectives, even an empty one, so a number that is too large looks like a hang."""
        setting = f"parallel.ep_plan.moe_num_chunks: {self.config.moe_num_chunks}"
        say_once(
            logging.WARNING,
            f"{setting}: more chunks than the {num_tokens} tokens of a call; each chunk costs its collectives; use 2 "
            "to 8, or moe_chunk_size for a number of tokens",
            about=setting,
        )

    def _warn_of_reroutes(self, rerouted: dict[int, int]) -> None:
        """Rarely, since near ties are decided differently in many steps."""
        emit("rerouted", "plan", by_rank=rerouted)
        if self._times_rerouted.again():
            choices = ", ".join(f"{n} choices on rank {rank}" for rank, n in rerouted.items())
            say(
                logging.WARNING,
                f"the router chose other experts when its block was recomputed ({choices}); the forward's choices were "
                f"kept (time {self._times_rerouted.times})",
                ranks=(0, min(rerouted)),
            )

    def _settings(self, arguments: Arguments) -> dict[str, object]:
        return settings_of(self.config, arguments, self._num_chunks.settled)

    def _plan(self, arguments: Arguments) -> PlannedCall:
        """Check, agree, count, launch the plan's gather: the same collectives on every rank, whatever it finds.

        If the counts decide on the number of chunks, this waits for them, before the first rows are permuted.
        """
        group, device, num_experts = arguments.group, arguments.x_TH.device, arguments.num_experts
        error = self._problem(arguments)
        settings = {} if error else self._settings(arguments)
        if error and group_size(group) == 1:
            raise ValueError(error)
        self._agreement.reach("forward", arguments, settings, error)

        # its size depends only on the configuration and the group: a rank with an error joins the gather, too
        ranks = group_size(group)
        columns = Columns(num_experts, 0 if ranks == 1 or self.config.chunk_moe_dispatch == PER_EXPERT else ranks)
        dispatch = PER_EXPERT if error else choose_dispatch(self.config.chunk_moe_dispatch, arguments)
        num_tokens = 0 if error else arguments.x_TH.shape[0]
        chunks, by_counts = self._chunks(num_tokens, group, device)
        tokens = chunks.slices
        if error:
            route_TK, checksum = torch.empty((0, 1), dtype=torch.int64, device=device), -1
            counts = torch.zeros(len(tokens) * columns.total, dtype=torch.int64, device=device)
        else:
            route_TK = route(arguments.selected_experts, num_experts, arguments.pad_T())
            checksum = zlib.crc32(repr(settings).encode())
            back_end = ops.resolve(self.config.chunk_moe_backend, device)
            counts = back_end.count(columns.keys(route_TK, chunks), len(tokens) * columns.total)
        rerouted, self._rerouted = self._rerouted, None
        gather = Gather(
            counts,
            columns,
            counts.new_zeros(1) if rerouted is None else rerouted,
            checksum,
            group,
            on_disagreement=lambda: agree(settings, error, group, device),
            on_rerouted=self._warn_of_reroutes,
        )
        read = gather.read
        if error:
            read()  # raises, on every rank
        if by_counts:
            fine = read()
            num_chunks = self._num_chunks.choose(fine, arguments, back_end, dispatch)
            tokens, read = merge_slices(tokens, num_chunks), functools.partial(fine.merged, num_chunks)
        plan = PendingPlan(read, tokens, group, per_rank=dispatch == PER_RANK)
        return PlannedCall(plan, tokens, route_TK, dispatch, Draws(device), grad=torch.is_grad_enabled())

    def _chunks(
        self, num_tokens: int, group: dist.ProcessGroup | None, device: torch.device
    ) -> tuple[ChunkSlices, bool]:
        """The chunks of a call, and whether its counts decide how many of them are merged."""
        number, size = self.config.moe_num_chunks, self.config.moe_chunk_size
        if size and not number:
            return ChunkSlices(num_tokens, agree_num_chunks(num_tokens, size, group, device), size), False
        if 0 < num_tokens < number and torch.is_grad_enabled():
            self._warn_of_empty_chunks(num_tokens)
        return ChunkSlices(num_tokens, self._num_chunks.slices), self._num_chunks.may_change

    def _run(self, arguments: Arguments, planned: PlannedCall, *, output: bool) -> torch.Tensor:
        back_end = ops.resolve(self.config.chunk_moe_backend, arguments.x_TH.device)
        call = Call(
            schedule=self.config.chunk_moe_schedule,
            lookahead=self.config.chunk_moe_lookahead,
            tokens=planned.tokens,
            group=arguments.group,
            ops=back_end,
            activation=self._activation(arguments, planned.draws),
            needs=arguments.needs(),
            compute_dtype=arguments.compute_dtype,
            transposed=self.weight_layout == "LFH",
            keep=self.config.keep,
            dispatch=make_dispatch(planned.dispatch, arguments, back_end, self.config.keep),
            output=output,
        )
        opened = Opened(call, planned.plan)
        edge = Open.apply(opened, arguments.x_TH, planned.route_TK, arguments.weight_TK(planned.route_TK))
        try:
            opened.filled = run_filler()
        except BaseException:  # a checkpoint's early stop is an exception, too
            opened.take_over().abandon()
            raise
        if not output:
            planned.draws.skip()
        out_TH = Close.apply(opened, edge, arguments.fc1, arguments.fc2, *call.activation.parameters)
        pad_T = arguments.pad_T()
        if pad_T is None:
            return out_TH
        return torch.where(pad_T[:, None], arguments.x_TH, out_TH.to(arguments.x_TH.dtype))

    def _activation(self, arguments: Arguments, draws: Draws) -> Activation:
        device = arguments.x_TH.device
        if arguments.activation is None:
            return SwiGLU(ops.resolve(self.config.chunk_moe_backend, device), arguments.swiglu_limit)
        return CustomActivation(arguments.activation, device, arguments.fc2_width, draws)

    def _problem(self, arguments: Arguments) -> str | None:
        """The fault of a call on this rank, in one line, or None."""
        error = arguments.problem()
        if error is not None:
            return error
        try:
            ops.resolve(self.config.chunk_moe_backend, arguments.x_TH.device)
        except ValueError as refusal:
            return str(refusal)
        if arguments.activation is None:
            return None
        return self._activation_problem(arguments)

    def _activation_problem(self, arguments: Arguments) -> str | None:
        """A module is tested once for each kind of use. Any other callable may change, and is tested in each call."""
        module = arguments.activation if isinstance(arguments.activation, nn.Module) else None
        dtype, grad, device = arguments.compute_dtype, backward_follows(), arguments.x_TH.device
        usage = (arguments.fc1_width, arguments.fc2_width, dtype, grad)
        if module is not None and usage in self._probed.setdefault(module, set()):
            return None
        probe_1F = torch.zeros((1, arguments.fc1_width), dtype=dtype, device=device)
        activation = cast(CustomActivation, self._activation(arguments, Draws(device)))
        error = activation.problem(probe_1F, backward_follows=grad)
        if error is None and module is not None:
            self._probed[module].add(usage)
        return error
