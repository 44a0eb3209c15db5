"""Layouts with tensor and pipeline parallelism and a distributed optimizer, as Megatron-LM has them.

memory     of the fullest pipeline stage: weight + gradient bytes stay on every rank, the rest is spread over the
           data-parallel ranks
TP         per layer and micro batch 2 all-reduces of T H s forward and 2 backward, and 2 in a recompute (Shoeybi et
           al., Megatron-LM, arXiv:1909.08053; with sequence parallelism a reduce-scatter and an all-gather of the same
           bytes)
PP         per micro batch T H s to the next stage and back (Narayanan et al., arXiv:2104.04473)
DP         per step the gradients, reduce-scattered in fp32, and the parameters, gathered in their own format
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mindspeed_chunk.hardware import ALL_GATHER, ALL_REDUCE, POINT_TO_POINT, REDUCE_SCATTER, LinkSeconds
from mindspeed_chunk.planner.estimate import Estimate, Estimator, once
from mindspeed_chunk.planner.layout import Layout, layouts
from mindspeed_chunk.planner.recommend import best_of
from mindspeed_chunk.planner.sequence import ulysses_problem
from mindspeed_chunk.planner.setting import Job, Setting
from mindspeed_chunk.planner.state import StateBytes
from mindspeed_chunk.planner.traffic import Collective

MEGATRON = "megatron"
_MICRO_BATCHES = (1, 2, 4)
_PAIR = ((1, 4), (2, 8))  # (part of a node that TP takes, PP): the two ways to lay out several nodes that are compared


class Megatron(Estimator):
    """Estimates of settings of this back end; it has no Chunk MoE, so one chunk."""

    def best(self, layout: Layout) -> Estimate:
        """Of a few micro batches, each recomputed: `best_of` prefers that to what is only counted."""
        samples = self.job.global_batch // layout.dp
        tried = [
            Setting(layout=layout, backend=MEGATRON, micro_batch=size, accumulation=samples // size, policy="full")
            for size in _MICRO_BATCHES
            if samples % size == 0
        ]
        return best_of(self.job, list(map(self, tried)))

    @once
    def _state(self, layout: Layout) -> StateBytes:
        recipe, (others, experts) = self.job.recipe, self._elements(layout)
        spread = recipe.master + recipe.moments
        optimizer = others * spread // layout.size("dp_cp") + experts * spread // layout.edp
        return StateBytes((others + experts) * recipe.weight, (others + experts) * recipe.grad, optimizer)

    def _gathered(self, ep: int) -> int:
        return 0

    def _gathers(
        self, setting: Setting, directions: Iterable[tuple[float, Iterable[float]]]
    ) -> tuple[float, LinkSeconds]:
        return 0.0, LinkSeconds()

    def _sent(self, layout: Layout, tokens: int, passes: int, again: bool) -> tuple[float, LinkSeconds]:
        seconds, links = self._links(layout, self._own_traffic(layout, tokens, passes, again))
        at_end, links_at_end = self._at_end(layout)
        return seconds + at_end, links.plus(links_at_end)

    @once
    def _at_end(self, layout: Layout) -> tuple[float, LinkSeconds]:
        return self._links(layout, self._optimizer_traffic(layout))

    def _links(self, layout: Layout, collectives: list[Collective]) -> tuple[float, LinkSeconds]:
        """Seconds of collectives that nothing hides, and on the links."""
        seconds, links = 0.0, LinkSeconds()
        for each in collectives:
            call = self._link_seconds(each.kind, each.nbytes / each.calls, self._span(layout, each.group))
            one = LinkSeconds().plus(call, each.calls)
            seconds, links = seconds + max(one), links.plus(one)
        return seconds, links

    def _own_traffic(self, layout: Layout, tokens: int, passes: int, again: bool) -> list[Collective]:
        """The collectives of TP, PP and CP."""
        job = self.job
        hidden = tokens * job.model.hidden_size * job.element_size
        collectives = []
        if layout.tp > 1:
            calls = (6 if again else 4) * (job.model.num_hidden_layers // layout.pp) * passes
            collectives.append(Collective("tp", ALL_REDUCE, layout.tp, calls, calls * hidden))
        if layout.pp > 1:
            collectives.append(Collective("pp", POINT_TO_POINT, layout.pp, 2 * passes, 2 * passes * hidden))
        return collectives + super()._own_traffic(layout, tokens, passes, again)

    def _optimizer_traffic(self, layout: Layout) -> list[Collective]:
        """The collectives at the end of a step."""
        recipe, collectives = self.job.recipe, []
        for group, elements in zip(("dp_cp", "edp"), self._elements(layout)):
            if (ranks := layout.size(group)) > 1:
                collectives.append(Collective(group, REDUCE_SCATTER, ranks, 1, elements * recipe.grad))
                collectives.append(Collective(group, ALL_GATHER, ranks, 1, elements * recipe.gathered))
        return collectives

    def _parameter_traffic(self, setting: Setting) -> list[Collective]:
        return self._optimizer_traffic(setting.layout)

    def _elements(self, layout: Layout) -> tuple[int, int]:
        """On a rank of the fullest stage: of everything except the experts, and of the experts."""
        others, experts = max(self._stages(layout.pp), key=lambda stage: stage[0] + stage[1] // layout.ep)
        return others // layout.tp, experts // (layout.tp * layout.ep)

    @once
    def _stages(self, pp: int) -> list[tuple[int, int]]:
        """Elements of each stage, the experts' separately.

        The first stage has the embedding and the vision tower, too, the last one the final norm and the head.
        """
        first, *blocks, last = self._parts()
        size = len(blocks) // pp
        stages = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        stages[0].append(first)
        stages[-1].append(last)
        return [(sum(others for others, _ in stage), sum(experts for _, experts in stage)) for stage in stages]

    @once
    def _parts(self) -> list[tuple[int, int]]:
        """Elements of what comes before the blocks, of each block, and of what comes after them, the experts' apart."""
        parts = [[0, 0] for _ in range(self.job.model.num_hidden_layers + 2)]
        for parameter in self.job.model.parameters():
            _, _, number = parameter.name.partition("language_model.layers.")
            after = parameter.name.startswith(("lm_head", "model.language_model.norm"))
            part = 1 + int(number.partition(".")[0]) if number else -1 if after else 0
            parts[part][parameter.expert] += parameter.numel
        return [(others, experts) for others, experts in parts]


def pair(job: Job) -> Iterator[tuple[Layout, str | None]]:
    """The two layouts that are always shown, next to each other, each with its problem or None."""
    for part, pp in _PAIR:
        tp = max(1, job.devices_per_node // part)
        layout = Layout(tp=tp, dp=max(1, job.world // (tp * pp)), pp=pp)
        if layout.world != job.world:
            yield layout, f"TP x PP = {tp * pp} does not divide {job.world} ranks"
        else:
            yield layout, _problem(job, layout)


def possible(job: Job) -> Iterator[Layout]:
    """All layouts with TP or PP that can run."""
    model = job.model
    sizes = {"heads": model.num_attention_heads, "layers": model.num_hidden_layers, "experts": model.num_experts}
    for layout in layouts(job.world, **sizes):
        if layout.tp * layout.pp > 1 and _problem(job, layout) is None:
            yield layout


def _problem(job: Job, layout: Layout) -> str | None:
    model = job.model
    if model.num_attention_heads % layout.tp or model.moe_intermediate_size % layout.tp:
        return f"TP={layout.tp} does not divide the attention heads or the experts' width"
    if layout.tp > job.devices_per_node:
        return f"TP={layout.tp} is larger than a node"
    if model.num_hidden_layers % layout.pp:
        return f"{layout.pp} stages do not divide {model.num_hidden_layers} layers"
    if job.global_batch % layout.dp:
        return f"DP={layout.dp} does not divide {job.global_batch} samples"
    return ulysses_problem(model, layout.cp, job.sequence)
