"""Memory and time of one setting, put together from the other modules' parts.

Memory of a rank at its peak (in the backward of one block), in bytes:

    parameters, gradients, optimizer   `state.py`
    gathered      two blocks (one ahead) in the format in which they are computed; one block's gradients in that format
                  and, for the reduce-scatter, in fp32
    activations   `activations.py`; with ChunkMBS also three hidden states of the whole batch (docs/performance.md:
                  3.06 measured); a pipeline's first stage holds PP micro batches
    expert layer  what a running MoE layer holds in addition to what it keeps, and the totals of its weight gradients
    head          the logits of `chunk_loss` tokens of the micro batch (`Setting.loss_chunk` of each of its samples): in
                  their own format, in fp32, and their gradient

Seconds of a step: a forward of a block costs f, its backward 2f, its recompute another f. A pipeline of PP stages and m
micro batches is idle for (PP - 1) / m of its time (Narayanan et al., arXiv:2104.04473). FSDP2's gather of a block runs
during the block before it, and shares the links with that block's own exchanges. So only the time counts by which
both together are longer than that block's work. In the backward of every pass the reduce-scatter is added to the gather
(`traffic.py`). A step is never shorter than all that its busiest link sends. Transfers of offloaded activations are
assumed to be hidden. Images are not counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

from mindspeed_chunk.hardware import ALL_GATHER, REDUCE_SCATTER, GroupShape, LinkSeconds, link_seconds
from mindspeed_chunk.moe.costs.memory import ExpertMemory, expert_memory
from mindspeed_chunk.moe.costs.rows import LayerShape, balanced_rows
from mindspeed_chunk.moe.costs.timing import ChunkTimes, chunk_times
from mindspeed_chunk.planner.activations import RECOMPUTED, BlockBytes, activations, block_bytes
from mindspeed_chunk.planner.layout import Layout
from mindspeed_chunk.planner.sequence import ulysses_traffic
from mindspeed_chunk.planner.setting import Job, Setting
from mindspeed_chunk.planner.state import Sharding, StateBytes, state_bytes, units
from mindspeed_chunk.planner.traffic import REDUCED, Collective, expert_traffic, fsdp_traffic

_CHUNK_MBS_HIDDEN = 3  # hidden states of the whole batch that ChunkMBS holds
_BACKWARD = 2  # forwards

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Estimate:
    """Of one setting. Times are computed when they are read: of most settings only the peak is.

    Attributes:
        memory: bytes of one rank by part.
        peak: bytes of all parts together.
        host: bytes of offloaded activations of one rank.
        expert: of a call of an MoE layer.
    """

    def __init__(self, estimator: Estimator, setting: Setting) -> None:
        self._estimator, self.setting = estimator, setting
        self.expert = estimator.expert_memory(setting)
        self.memory, self.host = estimator.memory(setting, self.expert)
        self.peak = sum(self.memory.values())

    @functools.cached_property
    def _seconds(self) -> tuple[dict[str, float], LinkSeconds]:
        # offloading takes no time that recomputing does not
        setting = self.setting
        policy = "full" if setting.policy in RECOMPUTED else setting.policy
        return self._estimator.seconds(dataclasses.replace(setting, policy=policy))

    @property
    def seconds(self) -> dict[str, float]:
        """Of one optimizer step by part."""
        return self._seconds[0]

    @functools.cached_property
    def step(self) -> float:
        """Seconds of all parts together."""
        return sum(self.seconds.values())

    @property
    def links(self) -> LinkSeconds:
        """Seconds for which the busiest rank uses each link in a step, if no two of its collectives do so together."""
        return self._seconds[1]

    @property
    def times(self) -> ChunkTimes:
        """Of a call of an MoE layer."""
        return self._estimator.chunk_times(self.setting)


class _LayerSeconds(NamedTuple):
    """Of a call of an MoE layer.

    Attributes:
        forward, exposed: seconds of the forward, and how many of them are exposed; in the backward the other two.
    """

    times: ChunkTimes
    forward: float
    exposed: float
    backward: float
    exposed_back: float


def once(method: _Method) -> _Method:
    """A method of `Estimator` that is called once for equal arguments: many settings share them."""

    @functools.wraps(method)
    def known(self: Estimator, *of: Hashable) -> Any:
        key = (method, *of)
        if key not in self.known:
            self.known[key] = method(self, *of)
        return self.known[key]

    return cast(_Method, known)


class Estimator:
    """Estimates of settings of FSDP2 for one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.known: dict[tuple, Any] = {}

    def __call__(self, setting: Setting) -> Estimate:
        return Estimate(self, setting)

    def expert_memory(self, setting: Setting) -> ExpertMemory:
        """Of a call of an MoE layer."""
        return self._expert_memory(setting.layer(self.job), setting.num_chunks, setting.schedule, setting.keep)

    def chunk_times(self, setting: Setting) -> ChunkTimes:
        """Of a call of an MoE layer."""
        return self._layer(setting).times

    @once
    def _expert_memory(self, shape: LayerShape, num_chunks: int, schedule: str, keep: str) -> ExpertMemory:
        rows = balanced_rows(shape, num_chunks, self.job.imbalance)
        return expert_memory(shape, schedule=schedule, keep=keep, rows=rows)

    def _layer(self, setting: Setting) -> _LayerSeconds:
        span = self._span(setting.layout, "ep")
        return self._layer_seconds(setting.layer(self.job), span, setting.num_chunks, setting.schedule, setting.keep)

    @once
    def _layer_seconds(
        self, shape: LayerShape, span: GroupShape, num_chunks: int, schedule: str, keep: str
    ) -> _LayerSeconds:
        job, rows = self.job, balanced_rows(shape, num_chunks, self.job.imbalance)
        times = chunk_times(shape, job.device, span, dtype=job.compute, schedule=schedule, keep=keep, rows=rows)
        directions = (times.forward, times.backward)
        return _LayerSeconds(times, *(value for each in directions for value in (each.total, each.exposed)))

    @once
    def _block(self, expert: ExpertMemory, tokens: int, tp: int) -> BlockBytes:
        return block_bytes(self.job.model, tokens, self.job.element_size, expert, tp)

    @once
    def _link_seconds(self, kind: str, nbytes: float, span: GroupShape) -> LinkSeconds:
        return link_seconds(kind, nbytes, span, self.job.device)

    def _span(self, layout: Layout, kind: str) -> GroupShape:
        return layout.span(kind, self.job.devices_per_node)

    def sharding(self, ep: int) -> Sharding:
        """How FSDP2 spreads the model over the job's ranks."""
        return Sharding(self.job.world, ep, train_vision=self.job.train_vision)

    # memory

    def memory(self, setting: Setting, expert: ExpertMemory) -> tuple[dict[str, int], int]:
        """Bytes of one rank by part, and those of offloaded activations on its host."""
        state = self._state(setting.layout)
        block = self._block(expert, setting.tokens(self.job), setting.layout.tp)
        kept = activations(setting.policy, block, self.job.model.num_hidden_layers // setting.layout.pp)
        held, host, batch = kept.kept, kept.host * setting.micro_chunks, 0
        if setting.micro_chunks > 1:
            batch = _CHUNK_MBS_HIDDEN * setting.micro_chunks * block.input
            held *= 1 if setting.policy == "offload" else setting.micro_chunks
        in_flight = min(setting.layout.pp, setting.accumulation)
        memory = {
            "parameters": state.parameters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "gathered": self._gathered(setting.layout.ep),
            "activations": held * in_flight + kept.working + batch,
            "expert layer": expert.peak - expert.kept + expert.weight_grads,
            "head": self._logits(setting),
        }
        return memory, host * in_flight

    def _logits(self, setting: Setting) -> int:
        job = self.job
        words = -(-job.model.vocab_size // setting.layout.tp)  # of the rank with the most
        return setting.micro_batch * setting.loss_chunk(job) * words * (job.element_size + 4 + 4)

    @once
    def _state(self, layout: Layout) -> StateBytes:
        return state_bytes(self.job.model, self.sharding(layout.ep), self.job.recipe)

    @once
    def _gathered(self, ep: int) -> int:
        blocks: Counter[str] = Counter()  # elements of each while it is gathered, its experts included
        for unit in units(self.job.model, self.sharding(ep)):
            if unit.in_block:
                elements = unit.gathered()
                for name in unit.names:
                    blocks[name.split(".layers.")[1].split(".")[0]] += elements
        block, head = max(blocks.values()), self.job.model.vocab_size * self.job.model.hidden_size
        size = self.job.recipe.gathered
        return max(2 * block, head) * size + max(block, head) * (size + REDUCED)

    # time

    @once
    def seconds(self, setting: Setting) -> tuple[dict[str, float], LinkSeconds]:
        """Seconds of a step by part, and on the links."""
        layout, passes, job, layer = setting.layout, setting.accumulation, self.job, self._layer(setting)
        layers, chunks, tokens = job.model.num_hidden_layers // layout.pp, setting.micro_chunks, setting.tokens(job)
        again = 1.0 if setting.policy in RECOMPUTED else 0.0
        count = layers * chunks * passes
        dense = self._dense_seconds(tokens) / layout.tp
        seconds = {
            "attention and dense": count * dense * (1 + _BACKWARD),
            "experts": count * (layer.forward - layer.exposed + layer.backward - layer.exposed_back),
            "recompute": count * again * (dense + layer.forward - layer.exposed),
            "exposed all-to-all": count * (layer.exposed * (1 + again) + layer.exposed_back),
            "head": self._head_seconds(setting),
        }
        # hidden by nothing: collectives of TP, CP and a distributed optimizer, sends and bubble of a pipeline
        sent, links = self._sent(layout, tokens, chunks * passes, bool(again))
        exchanged, exchanged_back = layer.times.links
        links = links.plus(exchanged, count * (1 + again)).plus(exchanged_back, count)
        # a block of one pass: its work, and its exchanges on the links
        context = self._context(layout, tokens)
        forward = chunks * (dense + layer.forward + max(context))
        backward = chunks * (_BACKWARD * dense + layer.backward + max(context)) + again * forward
        busy = [chunks * (own + other) for own, other in zip(exchanged, context)]
        busy_back = [chunks * (own + other) + again * f for own, other, f in zip(exchanged_back, context, busy)]
        exposed, gathered = self._gathers(setting, ((forward, busy), (backward, busy_back)))
        links = links.plus(gathered)
        seconds["exposed gathers"] = exposed
        work = sum(seconds.values()) + sent
        seconds["model parallel"] = sent + work * (layout.pp - 1) / passes
        # every byte of the state is read and written once
        seconds["optimizer"] = 2 * self._state(layout).total / job.device.memory_rate
        seconds["exposed gathers"] += max(0.0, max(links) - sum(seconds.values()))
        return seconds, links

    def _gathers(
        self, setting: Setting, directions: Iterable[tuple[float, Iterable[float]]]
    ) -> tuple[float, LinkSeconds]:
        """Seconds of FSDP2's collectives in a step that no work hides, and all of theirs on the links.

        Args:
            directions: of a block's forward and backward, the seconds of its work, and on the links those of its
                exchanges.
        """
        *loads, all_units = self._unit_collectives(setting.layout.ep)
        exposed = sum(
            max(0.0, max(own + load for own, load in zip(busy, loads_of)) - work)
            for (work, busy), loads_of in zip(directions, loads, strict=True)
        )
        passes = setting.accumulation
        return self.job.model.num_hidden_layers * passes * exposed, LinkSeconds().plus(all_units, passes)

    @once
    def _context(self, layout: Layout, tokens: int) -> LinkSeconds:
        """On the links, the exchanges of ranks that share a sequence, in the forward of the mean block."""
        job, links = self.job, LinkSeconds()
        if layout.cp > 1:
            span = self._span(layout, "cp")
            for kind, calls, nbytes in ulysses_traffic(job.model, layout.cp, tokens, job.element_size, directions=1):
                links = links.plus(self._link_seconds(kind, nbytes / calls, span), calls)
        return LinkSeconds().plus(links, 1 / job.model.num_hidden_layers)

    def core_share(self) -> float:
        """Of a block's forward operations, those of its attention core."""
        model = self.job.model
        experts = 6 * model.num_experts_per_tok * model.hidden_size * model.moe_intermediate_size
        dense, core = 2 * self._dense_weights() / model.num_hidden_layers, self._core_operations()
        return core / (dense + core + experts)

    @once
    def _dense_seconds(self, tokens: int) -> float:
        """The forward of everything in the mean block except its experts."""
        job = self.job
        weights = self._dense_weights() / job.model.num_hidden_layers
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

    @once
    def _dense_weights(self) -> int:
        prefix = "model.language_model.layers."
        return sum(p.numel for p in self.job.model.parameters() if p.name.startswith(prefix) and not p.expert)

    def _head_seconds(self, setting: Setting) -> float:
        job, layout = self.job, setting.layout
        tokens = setting.micro_batch * setting.accumulation * job.sequence // layout.cp
        operations = 2 * tokens * job.model.vocab_size * job.model.hidden_size * (1 + _BACKWARD)
        return operations / job.device.rate(job.compute) / layout.tp

    @once
    def _unit_collectives(self, ep: int) -> tuple[LinkSeconds, LinkSeconds, LinkSeconds]:
        """On the links: of the mean block's forward and backward, and of all units in a pass."""
        job, layout = self.job, Layout(ep=ep, dp=self.job.world)
        gather = reduce = others = LinkSeconds()
        for unit in units(job.model, self.sharding(ep)):
            if not unit.trained:
                continue
            span, number = self._span(layout, "edp" if unit.expert else "dp_cp"), unit.number
            gathered = self._link_seconds(ALL_GATHER, unit.gathered() * job.recipe.gathered, span)
            reduced = self._link_seconds(REDUCE_SCATTER, unit.gathered() * REDUCED, span)
            if unit.in_block:
                gather, reduce = gather.plus(gathered, number), reduce.plus(reduced, number)
            else:
                others = others.plus(gathered, 2 * number).plus(reduced, number)
        share = 1 / job.model.num_hidden_layers
        both = gather.plus(reduce)
        return LinkSeconds().plus(gather, share), LinkSeconds().plus(both, share), others.plus(gather).plus(both)

    # traffic

    def _sent(self, layout: Layout, tokens: int, passes: int, again: bool) -> tuple[float, LinkSeconds]:
        """Seconds of the collectives that nothing hides, and on the links."""
        context, times = self._context(layout, tokens), self.job.model.num_hidden_layers * passes * (2 + again)
        return times * max(context), LinkSeconds().plus(context, times)

    def traffic(self, setting: Setting) -> list[Collective]:
        """All collectives of one step, balanced."""
        model, again = self.job.model, setting.policy in RECOMPUTED
        passes = setting.accumulation * setting.micro_chunks
        how: dict[str, Any] = {"num_chunks": setting.num_chunks, "keep": setting.keep, "recompute": again}
        experts = expert_traffic(model, setting.layer(self.job), passes=passes, **how)
        own = self._own_traffic(setting.layout, setting.tokens(self.job), passes, again)
        return self._parameter_traffic(setting) + own + experts

    def _parameter_traffic(self, setting: Setting) -> list[Collective]:
        sharding = self.sharding(setting.layout.ep)
        return fsdp_traffic(self.job.model, sharding, self.job.recipe, setting.accumulation)

    def _own_traffic(self, layout: Layout, tokens: int, passes: int, again: bool) -> list[Collective]:
        """What nothing hides: here the exchanges of ranks that share a sequence. `again`: blocks are recomputed."""
        job, directions = self.job, 3 if again else 2
        if layout.cp == 1:
            return []
        return [
            Collective("cp", kind, layout.cp, calls * passes // layout.pp, nbytes * passes // layout.pp)
            for kind, calls, nbytes in ulysses_traffic(job.model, layout.cp, tokens, job.element_size, directions)
        ]
