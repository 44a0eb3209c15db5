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

from mindspeed_chunk.planner.activations import RECOMPUTED, BlockBytes, activations, block_bytes
from mindspeed_chunk.planner.expert_memory import ExpertMemory, LayerShape, balanced_rows, expert_memory
from mindspeed_chunk.planner.layout import Layout, Span
from mindspeed_chunk.planner.links import ALL_GATHER, REDUCE_SCATTER, collective_seconds
from mindspeed_chunk.planner.setting import FSDP2, Job, Setting
from mindspeed_chunk.planner.state import Sharding, StateBytes, state_bytes, units
from mindspeed_chunk.planner.timing import ChunkTimes, chunk_times
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


class _Layer(NamedTuple):
    """What a call of an MoE layer takes; seconds of its forward and backward, and what of them is exposed."""

    memory: ExpertMemory
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
        layer, state = self._layer(setting), self._state(setting)
        memory, host = self._memory(setting, layer.memory, state)
        return Estimate(setting, memory, self._seconds(setting, layer, state), host, layer.memory, layer.times)

    def _once(self, make: Callable[..., _Made], *of: Hashable) -> _Made:
        key = (make.__name__, *of)
        if key not in self._cache:
            self._cache[key] = make(*of)
        return self._cache[key]

    def _layer(self, setting: Setting) -> _Layer:
        layout, span = setting.layout, setting.layout.span("ep", self.job.devices_per_node)
        how = (setting.num_chunks, setting.schedule, setting.keep)
        key = ("layer", setting.tokens(self.job), layout.tp, layout.ep, span, *how)
        if key not in self._cache:
            self._cache[key] = self._made_layer(setting.layer(self.job), span, *how)
        return self._cache[key]

    def _made_layer(self, shape: LayerShape, span: Span, num_chunks: int, schedule: str, keep: str) -> _Layer:
        job = self.job
        rows = balanced_rows(shape, num_chunks, job.imbalance)
        memory = expert_memory(shape, schedule=schedule, keep=keep, rows=rows)
        times = chunk_times(shape, job.device, span, schedule=schedule, keep=keep, dtype=job.compute, rows=rows)
        forward, backward = times
        return _Layer(memory, times, forward.total, forward.exposed, backward.total, backward.exposed)

    def sharding(self, setting: Setting) -> Sharding:
        return Sharding(self.job.world, setting.layout.ep, train_vision=self.job.train_vision)

    # memory

    def _memory(self, setting: Setting, expert: ExpertMemory, state: StateBytes) -> tuple[dict[str, int], int]:
        job, layout = self.job, setting.layout
        gathered = self._once(self._fsdp_gathered, layout.ep) if setting.backend == FSDP2 else 0
        tokens = setting.tokens(job)
        block = self._once(self._block, tokens, layout.tp, expert)
        kept = activations(setting.policy, block, job.model.num_hidden_layers // layout.pp)
        held, host, batch = kept.kept, kept.host * setting.micro_chunks, 0
        if setting.micro_chunks > 1:
            batch = _CHUNK_MBS_HIDDEN * setting.micro_chunks * block.input
            held *= 1 if setting.policy == "offload" else setting.micro_chunks
        in_flight = min(layout.pp, setting.accumulation)
        logits = setting.micro_batch * setting.loss_chunk(job) * job.model.vocab_size // layout.tp
        memory = {
            "parameters": state.parameters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "gathered": gathered,
            "activations": held * in_flight + kept.working + batch,
            "expert layer": expert.peak - expert.kept + expert.weight_grads,
            "head": logits * (job.element_size + 4 + 4),
        }
        return memory, host * in_flight

    def _block(self, tokens: int, tp: int, expert: ExpertMemory) -> BlockBytes:
        return block_bytes(self.job.model, tokens, self.job.element_size, expert, tp)

    def _state(self, setting: Setting) -> StateBytes:
        if setting.backend == FSDP2:
            return self._once(self._fsdp_state, setting.layout.ep)
        return self._once(self._megatron_state, setting.layout)

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

    def _seconds(self, setting: Setting, layer: _Layer, state: StateBytes) -> dict[str, float]:
        job, layout = self.job, setting.layout
        layers, chunks, passes = job.model.num_hidden_layers // layout.pp, setting.micro_chunks, setting.accumulation
        again = 1.0 if setting.policy in RECOMPUTED else 0.0
        dense = self._once(self._dense_seconds, setting.tokens(job)) / layout.tp
        count = layers * chunks * passes
        seconds = {
            "attention and dense": count * dense * (1 + _BACKWARD),
            "experts": count * (layer.forward - layer.exposed + layer.backward - layer.exposed_back),
            "recompute": count * again * (dense + layer.forward - layer.exposed),
            "exposed all-to-all": count * (layer.exposed * (1 + again) + layer.exposed_back),
            "head": self._once(self._head_seconds, layout, setting.micro_batch * setting.accumulation),
        }
        forward = chunks * (dense + layer.forward)
        backward = chunks * (_BACKWARD * dense + layer.backward + again * (dense + layer.forward))
        if setting.backend == FSDP2:
            seconds["exposed gathers"] = self._exposed_gathers(setting, forward, backward)
        seconds["model parallel"] = self._model_parallel(setting, sum(seconds.values()))
        # every byte of the state is read and written once
        seconds["optimizer"] = 2 * state.total / job.device.memory_rate
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

    def _head_seconds(self, layout: Layout, samples: int) -> float:
        job = self.job
        tokens = samples * job.sequence // layout.cp
        operations = 2 * tokens * job.model.vocab_size * job.model.hidden_size * (1 + _BACKWARD)
        return operations / job.device.rate(job.compute) / layout.tp

    def _exposed_gathers(self, setting: Setting, forward: float, backward: float) -> float:
        job = self.job
        gather, reduce = self._once(self._block_collectives, setting.layout.ep)
        one = max(0.0, gather - forward) + max(0.0, gather + reduce - backward)
        return job.model.num_hidden_layers * setting.accumulation * one

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

    def _model_parallel(self, setting: Setting, work: float) -> float:
        """What nothing hides: TP's and CP's collectives, a pipeline's sends and bubble, a distributed optimizer's."""
        sent = self._once(self._sent_seconds, *self._sender(setting))
        return sent + (work + sent) * (setting.layout.pp - 1) / setting.accumulation

    def _sent_seconds(self, layout: Layout, *sender: Any) -> float:
        job, found = self.job, self._own_traffic(layout, *sender)
        return sum(each.seconds(layout, job.devices_per_node, job.device) for each in found)

    # traffic

    def _sender(self, setting: Setting) -> tuple[Layout, str, str, int, int]:
        """All that `_own_traffic` depends on."""
        passes = setting.accumulation * setting.micro_chunks
        return setting.layout, setting.backend, setting.context, setting.tokens(self.job), passes

    def _own_traffic(
        self, layout: Layout, backend: str, context: str, tokens: int, micro_batches: int
    ) -> list[Collective]:
        model, recipe = self.job.model, self.job.recipe
        found = model_parallel_traffic(
            model, layout, recipe, tokens=tokens, micro_batches=micro_batches, context=context
        )
        return found if backend == FSDP2 else found + data_parallel_traffic(model, layout, recipe)

    def traffic(self, setting: Setting) -> list[Collective]:
        """All collectives of one step, balanced."""
        job = self.job
        found = self._own_traffic(*self._sender(setting))
        if setting.backend == FSDP2:
            found = fsdp_traffic(job.model, self.sharding(setting), job.recipe, setting.accumulation) + found
        again = setting.policy in RECOMPUTED
        passes = setting.accumulation * setting.micro_chunks
        how: dict[str, Any] = {"num_chunks": setting.num_chunks, "keep": setting.keep, "recompute": again}
        return found + expert_traffic(job.model, setting.layer(job), passes=passes, **how)
