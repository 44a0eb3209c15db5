"""Memory and time of one setting, put together from the other modules' parts.

Memory of a rank, in bytes, at the moment of its peak (the backward of one block):

    parameters, gradients, optimizer   `state.py`; the megatron back end keeps weight + gradient bytes on every rank and
                                       spreads the rest over the data-parallel ranks
    gathered      two blocks (one ahead) in the format they are computed in, one block's gradients in that format and,
                  on their way into the reduce-scatter, in fp32
    activations   `activations.py`; with ChunkMBS three hidden states of the whole batch (docs/performance.md: 3.06
                  measured); a pipeline's first stage holds PP micro batches
    expert layer  what the MoE layer at work holds above what it keeps, and the totals of its weight gradients
    head          the logits of `chunk_loss` tokens of the micro batch (`Setting.loss_chunk` of each of its samples): in
                  their own format, in fp32, and their gradient

Seconds of a step. A forward of a block costs f, its backward 2f, recomputation f again; a pipeline of PP stages and m
micro batches stands still for (PP - 1) / m of its time (Narayanan et al., arXiv:2104.04473). FSDP2's gather of a block
runs behind the block before it, so it costs what it is longer than that one's work; in every pass's backward its
reduce-scatter is there besides (`traffic.py`). Transfers of offloaded
activations are taken to be hidden. Images are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from mindspeed_chunk.hardware import ALL_GATHER, REDUCE_SCATTER, Span, collective_seconds
from mindspeed_chunk.moe.costs.memory import ExpertMemory, balanced_rows, expert_memory
from mindspeed_chunk.moe.costs.timing import ChunkTimes, chunk_times
from mindspeed_chunk.planner.activations import RECOMPUTED, BlockBytes, activations, block_bytes
from mindspeed_chunk.planner.layout import Layout
from mindspeed_chunk.planner.setting import FSDP2, Job, Setting
from mindspeed_chunk.planner.state import Sharding, StateBytes, state_bytes, units
from mindspeed_chunk.planner.traffic import (
    Collective,
    data_parallel_traffic,
    expert_traffic,
    fsdp_traffic,
    model_parallel_elements,
    model_parallel_traffic,
)

_REDUCED = 4  # bytes of an element in a reduce-scatter
_CHUNK_MBS_HIDDEN = 3  # hidden states of the whole batch that ChunkMBS holds
_BACKWARD = 2  # forwards

_Made = TypeVar("_Made")


class Estimate(NamedTuple):
    """Attributes:
    memory: bytes of one rank by part.
    seconds: of one optimizer step by part.
    host: bytes of offloaded activations of one rank.
    """

    setting: Setting
    memory: dict[str, int]
    seconds: dict[str, float]
    host: int
    expert: ExpertMemory
    times: ChunkTimes

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        return sum(self.seconds.values())


class _Common(NamedTuple):
    """What settings have in common that differ in N, schedule, keep and policy alone.

    Attributes:
        span: of the expert-parallel group.
        head: bytes of the logits, and seconds of the head.
        dense: seconds of the forward of a block's other parts than experts, on `tokens` tokens.
        collectives: seconds of FSDP2's gathers and reduce-scatters for a block.
        sent: seconds of `_own_traffic`.
    """

    tokens: int
    span: Span
    layers: int
    micro_chunks: int
    state: StateBytes
    gathered: int
    head: tuple[int, float]
    dense: float
    collectives: tuple[float, float]
    sent: float


class _Layer(NamedTuple):
    """A call of an MoE layer, and the block around it; seconds of its directions, and what of them is exposed."""

    memory: ExpertMemory
    block: BlockBytes
    times: ChunkTimes
    forward: float
    exposed: float
    backward: float
    exposed_back: float


@dataclass
class Estimator:
    """Estimates of many settings for one job; parts that settings share are computed once."""

    job: Job
    _cache: dict = field(default_factory=dict)

    def __call__(self, setting: Setting) -> Estimate:
        batch = (setting.micro_batch, setting.accumulation, setting.chunk_mbs)
        key = (setting.layout, setting.backend, setting.context, *batch)
        common = self._cache.get(key)
        if common is None:
            common = self._cache[key] = self._common(setting)
        layer = self._layer(setting, common)
        memory, host = self._memory(setting, common, layer)
        return Estimate(setting, memory, self._seconds(setting, common, layer), host, layer.memory, layer.times)

    def _once(self, make: Callable[..., _Made], *of: Hashable) -> _Made:
        key = (make.__name__, *of)
        if key not in self._cache:
            self._cache[key] = make(*of)
        return self._cache[key]

    def _common(self, setting: Setting) -> _Common:
        job, layout, fsdp2 = self.job, setting.layout, setting.backend == FSDP2
        tokens = setting.tokens(job)
        return _Common(
            tokens=tokens,
            span=layout.span("ep", job.devices_per_node),
            layers=job.model.num_hidden_layers // layout.pp,
            micro_chunks=setting.micro_chunks,
            state=self._once(self._fsdp_state, layout.ep) if fsdp2 else self._megatron_state(layout),
            gathered=self._once(self._fsdp_gathered, layout.ep) if fsdp2 else 0,
            head=(self._logits(setting), self._head_seconds(setting)),
            dense=self._once(self._dense_seconds, tokens) / layout.tp,
            collectives=self._once(self._block_collectives, layout.ep) if fsdp2 else (0.0, 0.0),
            sent=sum(each.seconds(layout, job.devices_per_node, job.device) for each in self._own_traffic(setting)),
        )

    def _layer(self, setting: Setting, common: _Common) -> _Layer:
        key = (common.tokens, common.span, setting.layout.tp, setting.num_chunks, setting.schedule, setting.keep)
        layer = self._cache.get(key)
        if layer is None:
            layer = self._cache[key] = self._made_layer(setting, common)
        return layer

    def _made_layer(self, setting: Setting, common: _Common) -> _Layer:
        job, shape = self.job, setting.layer(self.job)
        rows = balanced_rows(shape, setting.num_chunks, job.imbalance)
        how: dict[str, Any] = {"schedule": setting.schedule, "keep": setting.keep, "rows": rows}
        memory = expert_memory(shape, **how)
        times = chunk_times(shape, job.device, common.span, dtype=job.compute, **how)
        block = block_bytes(job.model, common.tokens, job.element_size, memory, setting.layout.tp)
        return _Layer(memory, block, times, *(value for each in times for value in (each.total, each.exposed)))

    def sharding(self, setting: Setting) -> Sharding:
        return Sharding(self.job.world, setting.layout.ep, train_vision=self.job.train_vision)

    # memory

    def _memory(self, setting: Setting, common: _Common, layer: _Layer) -> tuple[dict[str, int], int]:
        state, expert = common.state, layer.memory
        kept = activations(setting.policy, layer.block, common.layers)
        held, host, batch = kept.kept, kept.host * common.micro_chunks, 0
        if common.micro_chunks > 1:
            batch = _CHUNK_MBS_HIDDEN * common.micro_chunks * layer.block.input
            held *= 1 if setting.policy == "offload" else common.micro_chunks
        in_flight = min(setting.layout.pp, setting.accumulation)
        memory = {
            "parameters": state.parameters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "gathered": common.gathered,
            "activations": held * in_flight + kept.working + batch,
            "expert layer": expert.peak - expert.kept + expert.weight_grads,
            "head": common.head[0],
        }
        return memory, host * in_flight

    def _logits(self, setting: Setting) -> int:
        job = self.job
        words = -(-job.model.vocab_size // setting.layout.tp)  # of the rank with the most
        return setting.micro_batch * setting.loss_chunk(job) * words * (job.element_size + 4 + 4)

    def _fsdp_state(self, ep: int) -> StateBytes:
        return state_bytes(
            self.job.model, Sharding(self.job.world, ep, train_vision=self.job.train_vision), self.job.recipe
        )

    def _fsdp_gathered(self, ep: int) -> int:
        block = max(self._blocks(ep))
        head = self.job.model.vocab_size * self.job.model.hidden_size
        size = self.job.recipe.gathered
        return max(2 * block, head) * size + max(block, head) * (size + _REDUCED)

    def _blocks(self, ep: int) -> list[int]:
        """Elements of each block while it is gathered, its experts included."""
        found: dict[str, int] = {}
        for unit in units(self.job.model, Sharding(self.job.world, ep)):
            if ".layers." in unit.name:
                number = unit.name.split(".layers.")[1].split(".")[0]
                found[number] = found.get(number, 0) + unit.gathered()
        return list(found.values())

    def _megatron_state(self, layout: Layout) -> StateBytes:
        recipe = self.job.recipe
        others, experts = model_parallel_elements(self.job.model, layout)
        spread = recipe.master + recipe.moments
        optimizer = others * spread // layout.size("dp_cp") + experts * spread // layout.edp
        return StateBytes((others + experts) * recipe.weight, (others + experts) * recipe.grad, optimizer)

    # time

    def _seconds(self, setting: Setting, common: _Common, layer: _Layer) -> dict[str, float]:
        dense, chunks, passes = common.dense, common.micro_chunks, setting.accumulation
        again = 1.0 if setting.policy in RECOMPUTED else 0.0
        count = common.layers * chunks * passes
        seconds = {
            "attention and dense": count * dense * (1 + _BACKWARD),
            "experts": count * (layer.forward - layer.exposed + layer.backward - layer.exposed_back),
            "recompute": count * again * (dense + layer.forward - layer.exposed),
            "exposed all-to-all": count * (layer.exposed * (1 + again) + layer.exposed_back),
            "head": common.head[1],
        }
        if setting.backend == FSDP2:
            forward = chunks * (dense + layer.forward)
            backward = chunks * (_BACKWARD * dense + layer.backward + again * (dense + layer.forward))
            gather, reduce = common.collectives
            one = max(0.0, gather - forward) + max(0.0, gather + reduce - backward)
            seconds["exposed gathers"] = common.layers * passes * one
        # what nothing hides: TP's and CP's collectives, a pipeline's sends and bubble, a distributed optimizer's
        work = sum(seconds.values()) + common.sent
        seconds["model parallel"] = common.sent + work * (setting.layout.pp - 1) / passes
        # every byte of the state is read and written once
        seconds["optimizer"] = 2 * common.state.total / self.job.device.memory_rate
        return seconds

    def core_share(self) -> float:
        """Of a block's forward operations, those of its attention core."""
        model = self.job.model
        experts = 6 * model.num_experts_per_tok * model.hidden_size * model.moe_intermediate_size
        dense, core = 2 * self._once(self._dense_weights) / model.num_hidden_layers, self._core_operations()
        return core / (dense + core + experts)

    def _dense_seconds(self, tokens: int) -> float:
        """The forward of everything in the mean block but its experts."""
        job = self.job
        weights = self._once(self._dense_weights) / job.model.num_hidden_layers
        return tokens * (2 * weights + self._core_operations()) / job.device.rate(job.compute)

    def _core_operations(self) -> float:
        """Operations of the mean block's attention core on one token."""
        model, job = self.job.model, self.job
        full = model.num_full_attention
        # scores and their product with the values, half of them masked away
        attention = full * 2 * job.sequence * model.num_attention_heads * model.head_dim
        # decay, read, write and query of a state of key x value width in each head
        delta = (model.num_hidden_layers - full) * 6 * model.linear_value_width * model.linear_key_head_dim
        return (attention + delta) / model.num_hidden_layers

    def _dense_weights(self) -> int:
        prefix = "model.language_model.layers."
        return sum(p.numel for p in self.job.model.parameters() if p.name.startswith(prefix) and not p.expert)

    def _head_seconds(self, setting: Setting) -> float:
        job, layout = self.job, setting.layout
        tokens = setting.micro_batch * setting.accumulation * job.sequence // layout.cp
        operations = 2 * tokens * job.model.vocab_size * job.model.hidden_size * (1 + _BACKWARD)
        return operations / job.device.rate(job.compute) / layout.tp

    def _block_collectives(self, ep: int) -> tuple[float, float]:
        """Seconds of FSDP2's gathers and of its reduce-scatters for the mean block."""
        job, gather, reduce = self.job, 0.0, 0.0
        layout = Layout(ep=ep, dp=job.world)
        spans = {kind: layout.span(kind, job.devices_per_node) for kind in ("edp", "dp_cp")}
        for unit in units(job.model, Sharding(job.world, ep)):
            if ".layers." in unit.name:
                span, elements = spans["edp" if unit.expert else "dp_cp"], unit.gathered()
                gather += collective_seconds(ALL_GATHER, elements * job.recipe.gathered, span, job.device)
                reduce += collective_seconds(REDUCE_SCATTER, elements * _REDUCED, span, job.device)
        return gather / job.model.num_hidden_layers, reduce / job.model.num_hidden_layers

    # traffic

    def _own_traffic(self, setting: Setting) -> list[Collective]:
        job, layout = self.job, setting.layout
        found = model_parallel_traffic(
            job.model,
            layout,
            job.recipe,
            tokens=setting.tokens(job),
            micro_batches=setting.accumulation * setting.micro_chunks,
            context=setting.context,
        )
        return found if setting.backend == FSDP2 else found + data_parallel_traffic(job.model, layout, job.recipe)

    def traffic(self, setting: Setting) -> list[Collective]:
        """All collectives of one step, balanced."""
        job = self.job
        found = self._own_traffic(setting)
        if setting.backend == FSDP2:
            found = fsdp_traffic(job.model, self.sharding(setting), job.recipe, setting.accumulation) + found
        again = setting.policy in RECOMPUTED
        passes = setting.accumulation * setting.micro_chunks
        how: dict[str, Any] = {"num_chunks": setting.num_chunks, "keep": setting.keep, "recompute": again}
        return found + expert_traffic(job.model, setting.layer(job), passes=passes, **how)
