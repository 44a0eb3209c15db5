"""Goes through the settings that MindSpeed-MM's FSDP2 back end has, and recommends one, with reasons.

A setting must leave `reserve` of the memory free. What blocks keep outside their experts is counted, and has not been
measured. So settings that keep all of it come after those that recompute. Among the first that fit, and are at most 1 %
slower than the fastest, the plainest is recommended: fewer chunks, more kept, less recomputed, smaller groups, fewer
passes and micro-chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, cast

from mindspeed_chunk.config import KEEPS, ConfigError
from mindspeed_chunk.hardware import ALL_GATHER, REDUCE_SCATTER
from mindspeed_chunk.moe.costs.choice import CANDIDATES
from mindspeed_chunk.planner.estimate import Estimate, Estimator
from mindspeed_chunk.planner.layout import Layout, layouts
from mindspeed_chunk.planner.numbers import fixed
from mindspeed_chunk.planner.precision import FSDP2_RECIPES
from mindspeed_chunk.planner.sequence import ulysses_problem
from mindspeed_chunk.planner.setting import Job, Setting

_POLICIES = ("none", "full", "offload")  # those that the yaml can select
_SAME = 1.01  # times the fastest
_RUNNERS_UP = 4
_LARGEST_MICRO_BATCH = 8


class Only(NamedTuple):
    """Narrows the search to settings with these values; None: any."""

    ep: int | None = None
    cp: int | None = None
    micro_batch: int | None = None
    num_chunks: int | None = None

    def allows(self, setting: Setting) -> bool:
        values = (setting.layout.ep, setting.layout.cp, setting.micro_batch, setting.num_chunks)
        return all(wanted in (None, value) for wanted, value in zip(self, values, strict=True))

    def __str__(self) -> str:
        options = zip(("--ep", "--ulysses", "--micro-batch", "--num-chunks"), self, strict=True)
        return ", ".join(f"{name} {value}" for name, value in options if value is not None)


class Recommendation(NamedTuple):
    """Attributes:
    best: None if nothing fits.
    smallest: if nothing fits, the setting that needs the least memory.
    runners_up: the next ones, each with another layout, policy or way to batch.
    why: sentences.
    of_layout: each layout's own best setting or, if none fits, the one that needs the least memory.
    """

    best: Estimate | None
    smallest: Estimate | None
    runners_up: list[Estimate]
    why: list[str]
    of_layout: dict[Layout, Estimate]

    @property
    def chosen(self) -> Estimate:
        return self.best or cast(Estimate, self.smallest)


def recommend(job: Job, estimator: Estimator | None = None, only: Only | None = None) -> Recommendation:
    """Raises:
    ConfigError: if no layout fits the world, the model and the batch.
    """
    estimator, only = estimator or Estimator(job), only or Only()
    tried = list(_estimates(job, estimator, only))
    if not tried and any(value is not None for value in only):
        rule = f"none of the settings that are tried for {job.world} ranks and {job.global_batch} samples has that"
        chunks = ", ".join(map(str, CANDIDATES))
        raise ConfigError(f"{only}: {rule} (chunks: {chunks}, and with EP=1 one); change it")
    if not tried:
        rule = f"no layout of {job.world} ranks fits {job.global_batch} samples of {job.sequence} tokens"
        raise ConfigError.about("--nodes", job.nodes, rule, "change --global-batch, or the number of devices")
    fitting = sorted((each for each in tried if each.peak <= job.budget), key=lambda each: each.step)
    by_layout: dict[Layout, list[Estimate]] = {}
    for each in tried:
        by_layout.setdefault(each.setting.layout, []).append(each)
    of_layout = {layout: best_of(job, estimates) for layout, estimates in by_layout.items()}
    if not fitting:
        smallest = min(tried, key=lambda each: each.peak)
        return Recommendation(None, smallest, [], [_does_not_fit(job, smallest)], of_layout)
    best = best_of(job, fitting)
    why = list(_why(job, estimator, best, of_layout))
    counted = next((each for each in fitting if _only_counted(each)), None)
    if counted is not None and counted.step < best.step:
        why.append(_without_recompute(best, counted))
    return Recommendation(best, None, _runners_up(best, fitting), why, of_layout)


def _estimates(job: Job, estimator: Estimator, only: Only) -> Iterator[Estimate]:
    """Without those of settings that keep less of the experts' activations than one that fits: they are not faster."""
    fits = False
    for setting in filter(only.allows, candidates(job)):
        # the modes of a setting follow each other in the order of `KEEPS`
        if setting.keep == KEEPS[0] or not fits:
            estimate = estimator(setting)
            fits = estimate.peak <= job.budget
            yield estimate


def best_of(job: Job, estimates: list[Estimate]) -> Estimate:
    """Of those that fit, the plainest within 1 % of the fastest; if none fits, the one with the least memory.

    One that rests on what was only counted is taken if no other fits.
    """
    fitting = [each for each in estimates if each.peak <= job.budget]
    if not fitting:
        return min(estimates, key=lambda each: each.peak)
    fitting = [each for each in fitting if not _only_counted(each)] or fitting
    fastest = min(each.step for each in fitting)
    return min((each for each in fitting if each.step <= _SAME * fastest), key=_complexity)


def _only_counted(each: Estimate) -> bool:
    """Its memory rests on all activations of all blocks, which have not been measured."""
    return each.setting.policy == "none"


def _runners_up(best: Estimate, fitting: list[Estimate]) -> list[Estimate]:
    """The fastest of every other policy, then the fastest of what is left; `fitting` is in order of time."""
    by_character: dict[tuple, Estimate] = {}
    for each in fitting:
        by_character.setdefault(_character(each), each)
    by_character.pop(_character(best), None)
    policies = {best.setting.policy}
    first: list[Estimate] = []
    rest: list[Estimate] = []
    for each in by_character.values():
        (rest if each.setting.policy in policies else first).append(each)
        policies.add(each.setting.policy)
    return sorted((first + rest)[:_RUNNERS_UP], key=lambda each: (_only_counted(each), each.step))


def candidates(job: Job) -> Iterator[Setting]:
    """Every setting that is considered."""
    for layout in fsdp_layouts(job):
        samples = job.global_batch // layout.dp
        for micro_batch, accumulation, chunk_mbs in _batches(samples):
            for policy in _POLICIES:
                if chunk_mbs and policy == "none":
                    continue  # every micro-chunk's activations would stay
                # with EP=1 MindSpeed-MM reaches no dispatcher, and its own experts run
                for num_chunks in CANDIDATES if layout.ep > 1 else CANDIDATES[:1]:
                    for keep in KEEPS if layout.ep > 1 else KEEPS[:1]:
                        yield Setting(
                            layout=layout,
                            micro_batch=micro_batch,
                            accumulation=accumulation,
                            chunk_mbs=chunk_mbs,
                            policy=policy,
                            num_chunks=num_chunks,
                            keep=keep,
                        )


def fsdp_layouts(job: Job) -> Iterator[Layout]:
    """Layouts without TP and PP that share out the batch evenly, and the sequence as Ulysses can."""
    for layout in layouts(job.world, heads=1, layers=1, experts=job.model.num_experts):
        if job.global_batch % layout.dp == 0 and not ulysses_problem(job.model, layout.cp, job.sequence):
            yield layout


def _batches(samples: int) -> Iterator[tuple[int, int, int]]:
    """(micro batch, accumulation, chunk_mbs) that make up `samples`."""
    for size in range(1, min(samples, _LARGEST_MICRO_BATCH) + 1):
        if samples % size == 0:
            yield size, samples // size, 0
            if size < samples:
                yield samples, 1, size


def _complexity(each: Estimate) -> tuple:
    setting = each.setting
    place = (_POLICIES.index(setting.policy), setting.layout.cp, setting.layout.ep)
    # one pass gathers once, and a batch that is not cut is simpler
    batch = (setting.accumulation, setting.micro_chunks)
    return (setting.num_chunks, KEEPS.index(setting.keep), *place, *batch, each.step)


def _character(each: Estimate) -> tuple:
    return each.setting.layout, each.setting.policy, bool(each.setting.chunk_mbs)


def _does_not_fit(job: Job, smallest: Estimate) -> str:
    return (
        f"Nothing fits: the least that a setting takes is {fixed(smallest.peak / 1e9, 1)} GB of the "
        f"{fixed(job.budget / 1e9, 1)} GB that may be used ({job.reserve:.0%} of {job.device.memory / 1e9:.3g} GB "
        "stay free). More devices share the parameters among more, a shorter sequence has smaller activations."
    )


def _why(job: Job, estimator: Estimator, best: Estimate, of_layout: dict[Layout, Estimate]) -> Iterator[str]:
    setting = best.setting
    yield (
        f"Memory: {fixed(best.peak / 1e9, 1)} GB of the {fixed(job.budget / 1e9, 1)} GB that may be used; the largest "
        f"part is {max(best.memory, key=best.memory.__getitem__)} with {fixed(max(best.memory.values()) / 1e9, 1)} GB."
    )
    yield from _why_layout(job, best, of_layout)
    yield from _why_chunks(estimator, best)
    if setting.keep != KEEPS[0] or setting.policy != "none":
        plain = estimator(dataclasses.replace(setting.as_passes(), keep=KEEPS[0], policy="none"))
        verdict = (
            "would not fit" if plain.peak > job.budget else f"would take {fixed(plain.step / best.step, 2)} of the time"
        )
        yield (
            f"Recompute {setting.policy}, keep {setting.keep}: with everything kept the peak is "
            f"{fixed(plain.peak / 1e9, 1)} GB, which {verdict}."
        )
    if _only_counted(best):
        yield (
            "Nothing is recomputed: what blocks keep outside their experts is counted, not measured. Look at the "
            "memory of a first step, or take a runner-up that recomputes."
        )
    if job.recipe.name not in FSDP2_RECIPES:
        yield (
            f"Precision {job.recipe.name} is none that MindSpeed-MM's FSDP2 yaml can ask for "
            f"({' and '.join(FSDP2_RECIPES)} are): the yaml has bf16."
        )
    if setting.chunk_mbs:
        other = estimator(setting.as_passes())
        calls = [
            {kind: sum(c.calls for c in traffic if c.kind == kind) for kind in (ALL_GATHER, REDUCE_SCATTER)}
            for traffic in map(estimator.traffic, (other.setting, setting))
        ]
        yield (
            f"ChunkMBS: {calls[1][ALL_GATHER]} parameter gathers and {calls[1][REDUCE_SCATTER]} reduce-scatters per "
            f"step, where accumulation makes {calls[0][ALL_GATHER]} and {calls[0][REDUCE_SCATTER]}; "
            f"the step takes {fixed(best.step / other.step, 2)} of the time."
        )
    if job.imbalance > 1:
        yield _imbalance(job, setting.layout)


def _without_recompute(best: Estimate, counted: Estimate) -> str:
    return (
        f"Without recompute, {counted.setting.title()} would take {fixed(counted.step / best.step, 2)} of the time, if "
        f"its {fixed(counted.peak / 1e9, 1)} GB are right: what blocks keep outside their experts is counted, not "
        "measured. Look at the memory of a first step."
    )


def _imbalance(job: Job, layout: Layout) -> str:
    coefficient = "the auxiliary loss (features.loss_cfg.router_aux_loss_coef) evens the routing out"
    if layout.ep == 1:
        return (
            f"Imbalance {job.imbalance:g}: with EP=1 every rank computes its own tokens' rows, as many as the others. "
            f"Expert parallelism waits for the busiest rank; {coefficient}."
        )
    counted = min(job.imbalance, layout.ep)
    at_most = f", {counted:g} at most with EP={layout.ep}" if counted < job.imbalance else ""
    return f"Imbalance {job.imbalance:g}{at_most}: the busiest rank's experts decide; {coefficient}."


def _why_layout(job: Job, best: Estimate, of_layout: dict[Layout, Estimate]) -> Iterator[str]:
    layout = best.setting.layout
    if layout.ep > 1:
        where = "inside a node" if layout.inside_node("ep", job.devices_per_node) else "across nodes"
        yield f"EP={layout.ep} {where}: {job.model.num_experts // layout.ep} experts per rank."
    else:
        yield "EP=1: no token leaves its rank; every rank gathers all experts of a layer in turn."
        yield _assumed(job, of_layout)
    steps: dict[int, float] = {}
    for each in of_layout.values():
        ep = each.setting.layout.ep
        if each.peak <= job.budget and ep != layout.ep:
            steps[ep] = min(each.step, steps.get(ep, each.step))
    others = ", ".join(f"EP={ep} {fixed(step / best.step, 2)}" for ep, step in sorted(steps.items()))
    if others:
        yield f"Step time of the best fitting setting with another EP, to this one's: {others}."


def _assumed(job: Job, of_layout: dict[Layout, Estimate]) -> str:
    text = (
        "With EP=1 MindSpeed-MM's own experts run, not this package's. They are assumed to take the time and memory of "
        "one chunk here; neither was measured."
    )
    chunked = [each for each in of_layout.values() if each.setting.layout.ep > 1 and each.peak <= job.budget]
    if chunked:
        other = min(chunked, key=lambda each: each.step)
        text += f" The best without that assumption: {other.setting.title()}, {fixed(other.step, 3)} s per step."
    return text


def _why_chunks(estimator: Estimator, best: Estimate) -> Iterator[str]:
    if best.setting.layout.ep == 1:
        return
    others = {n: estimator(dataclasses.replace(best.setting, num_chunks=n)) for n in CANDIDATES}
    exposed = ", ".join(f"N={n} {fixed(each.times.exposed * 1e3, 2)} ms" for n, each in others.items())
    held = ", ".join(f"N={n} {fixed(each.expert.peak / 1e9, 2)} GB" for n, each in others.items())
    yield (
        f"N={best.setting.num_chunks}: exposed all-to-all of a layer, forward and backward: {exposed}; "
        f"its peak: {held}."
    )
