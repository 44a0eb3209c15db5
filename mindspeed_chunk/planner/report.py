"""Everything that `mindspeed-chunk plan` reports about a job, as one dictionary of plain values.

The terminal's tables, the json output and the page all show this dictionary. Bytes are integers, times are seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mindspeed_chunk.config import KEEPS, SCHEDULES
from mindspeed_chunk.hardware import ALL_GATHER, REDUCE_SCATTER
from mindspeed_chunk.moe.costs.choice import CANDIDATES
from mindspeed_chunk.planner.activations import POLICIES, activations, block_bytes
from mindspeed_chunk.planner.compare import megatron as megatron_layouts
from mindspeed_chunk.planner.compare.megatron import MEGATRON, Megatron
from mindspeed_chunk.planner.compare.recipes import RECIPES
from mindspeed_chunk.planner.compare.ring import ring_problem, ring_traffic
from mindspeed_chunk.planner.estimate import Estimate, Estimator
from mindspeed_chunk.planner.fragments import fragments
from mindspeed_chunk.planner.given import Given
from mindspeed_chunk.planner.layout import KINDS, Layout
from mindspeed_chunk.planner.numbers import fixed
from mindspeed_chunk.planner.recommend import Only, Recommendation, recommend
from mindspeed_chunk.planner.sequence import ulysses_problem, ulysses_traffic
from mindspeed_chunk.planner.setting import Job, Setting
from mindspeed_chunk.planner.state import state_bytes
from mindspeed_chunk.planner.traffic import exchanges

_SHOWN_LAYOUTS = 6
# for each way to share a sequence: why it is impossible, and what it sends
_CONTEXTS = {"ulysses": (ulysses_problem, ulysses_traffic), "ring": (ring_problem, ring_traffic)}


def make_report(job: Job, given: Given | None = None, only: Only | None = None) -> dict[str, Any]:
    """Raises ConfigError if nothing can be recommended.

    Args:
        given: a yaml's setting for this job, estimated in addition.
        only: narrows the search.
    """
    estimator = Estimator(job)
    recommendation = recommend(job, estimator, only)
    chosen = recommendation.chosen
    return {
        "job": _job(job),
        **({"given": _given(estimator, given, recommendation)} if given else {}),
        "recommendation": _recommendation(job, recommendation),
        "layouts": list(_layouts(job, estimator, recommendation)),
        "precision": list(_precision(estimator, chosen.setting)),
        "batch": list(_batch(estimator, chosen.setting)),
        "activations": list(_activations(estimator, chosen)),
        "sequence": list(_sequence(job)),
        "chunks": list(_chunks(estimator, chosen.setting)),
        "yaml": fragments(job, chosen.setting) if recommendation.best else None,
    }


def _job(job: Job) -> dict[str, Any]:
    model, device = job.model, job.device
    return {
        "model": model.name,
        "model_source": model.source,
        "parameters": model.num_parameters(),
        "active_parameters": model.num_active(),
        "device": device.name,
        "device_sources": list(device.sources),
        "product": device.product,
        "product_per_node": device.per_node,
        "memory": round(device.memory),
        "budget": round(job.budget),
        "nodes": job.nodes,
        "devices_per_node": job.devices_per_node,
        "sequence": job.sequence,
        "global_batch": job.global_batch,
        "recipe": job.recipe.name,
        "imbalance": job.imbalance,
    }


def _as_json(each: Estimate) -> dict[str, Any]:
    setting = dataclasses.asdict(each.setting) | {"layout": each.setting.layout._asdict()}
    return {
        "title": each.setting.title(),
        "brief": each.setting.brief(),
        "setting": setting,
        "memory": each.memory,
        "peak": each.peak,
        "host": each.host,
        "seconds": each.seconds,
        "step": each.step,
        "links": each.links._asdict(),
    }


def _given(estimator: Estimator, given: Given, recommendation: Recommendation) -> dict[str, Any]:
    """The estimate of a yaml as it is, and what would make it fit, or faster."""
    job, own, best = estimator.job, estimator(given.setting), recommendation.best
    notes = [*given.notes]
    if own.peak > job.budget and best is not None:
        part = max(own.memory, key=own.memory.__getitem__)
        notes.append(
            f"It does not fit: the largest part is {part} with {fixed(own.memory[part] / 1e9, 1)} GB. This would fit: "
            f"{best.setting.title()}, {fixed(best.peak / 1e9, 1)} GB, {fixed(best.step, 3)} s per step."
        )
    elif own.peak > job.budget:
        notes.append("It does not fit, and nothing else does; the table below has the setting with the least memory.")
    elif best is not None and best.step < 0.99 * own.step:
        notes.append(f"Faster: {best.setting.title()}, {fixed(best.step / own.step, 2)} of the time.")
    return _as_json(own) | {"fits": own.peak <= job.budget, "notes": notes}


def _recommendation(job: Job, recommendation: Recommendation) -> dict[str, Any]:
    return {
        "fits": recommendation.best is not None,
        "best": _as_json(recommendation.best) if recommendation.best else None,
        "least_memory": _as_json(recommendation.smallest) if recommendation.smallest else None,
        "runners_up": [_as_json(each) for each in recommendation.runners_up],
        "why": recommendation.why,
    }


def _layouts(job: Job, estimator: Estimator, recommendation: Recommendation) -> Iterator[dict[str, Any]]:
    """The chosen one, the pair of 3D layouts next to each other, and the fastest others that fit.

    If few fit, those that need the least memory follow. Each has its own best setting; those with TP or PP
    have the best that `Megatron` tries.
    """
    megatron, pair = Megatron(job), list(megatron_layouts.pair(job))
    yield _layout(estimator, recommendation.chosen, "recommended" if recommendation.best else "least memory")
    for layout, problem in pair:
        if problem:
            yield {"title": str(layout), "role": "3D", "problem": problem}
        else:
            yield _layout(megatron, megatron.best(layout), "3D")
    shown = {recommendation.chosen.setting.layout, *(layout for layout, _ in pair)}
    others = [each for layout, each in recommendation.of_layout.items() if layout not in shown]
    others += [megatron.best(layout) for layout in megatron_layouts.possible(job) if layout not in shown]
    others.sort(key=lambda each: (0, each.step) if each.peak <= job.budget else (1, each.peak))
    for each in others[:_SHOWN_LAYOUTS]:
        yield _layout(megatron if each.setting.backend == MEGATRON else estimator, each, "other")


def _layout(estimator: Estimator, estimate: Estimate, role: str) -> dict[str, Any]:
    job, layout = estimator.job, estimate.setting.layout
    groups = {kind: layout.groups(kind) for kind in KINDS if layout.size(kind) > 1}
    return _as_json(estimate) | {
        "role": role,
        "groups": {kind: [list(group) for group in each] for kind, each in groups.items()},
        "inside_node": {kind: layout.inside_node(kind, job.devices_per_node) for kind in groups},
        "traffic": [
            each._asdict() | {"seconds": each.seconds(layout, job.devices_per_node, job.device)}
            for each in estimator.traffic(estimate.setting)
        ],
    }


def _precision(estimator: Estimator, chosen: Setting) -> Iterator[dict[str, Any]]:
    job, sharding = estimator.job, estimator.sharding(chosen.layout.ep)
    for recipe in RECIPES.values():
        yield recipe._asdict() | {
            "kept": recipe.kept,
            "rank": state_bytes(job.model, sharding, recipe).total,
            "possible": job.compute_of(recipe) in job.device.flops,
        }


def _batch(estimator: Estimator, chosen: Setting) -> Iterator[dict[str, Any]]:
    """The same samples as passes, and as micro-chunks of one pass."""
    samples = chosen.micro_batch * chosen.accumulation
    size = chosen.samples_at_once if chosen.samples_at_once < samples else 1
    passes = samples // size
    ways = {"accumulation": dataclasses.replace(chosen, micro_batch=size, accumulation=passes, chunk_mbs=0)}
    if passes > 1:
        policy = "offload" if chosen.policy == "none" else chosen.policy
        ways["ChunkMBS"] = dataclasses.replace(
            chosen, micro_batch=size * passes, accumulation=1, chunk_mbs=size, policy=policy
        )
    for name, setting in ways.items():
        traffic, row = estimator.traffic(setting), _as_json(estimator(setting))
        for key, kind in (("gathers", ALL_GATHER), ("reduce_scatters", REDUCE_SCATTER)):
            sent = [each for each in traffic if each.kind == kind]
            row |= {key: sum(each.calls for each in sent), f"{key}_bytes": sum(each.nbytes for each in sent)}
        yield row | {"name": name}


def _activations(estimator: Estimator, chosen: Estimate) -> Iterator[dict[str, Any]]:
    job, setting = estimator.job, chosen.setting
    block = block_bytes(job.model, setting.tokens(job), job.element_size, chosen.expert, setting.layout.tp)
    for policy in POLICIES:
        kept = activations(policy, block, job.model.num_hidden_layers, estimator.core_share())
        yield {"policy": policy} | kept._asdict()


def _sequence(job: Job) -> Iterator[dict[str, Any]]:
    for context, (problem_of, traffic_of) in _CONTEXTS.items():
        for ranks in (2, 4, 8):
            problem = problem_of(job.model, ranks, job.sequence)
            tokens = -(-job.sequence // ranks)  # of the rank with the most
            traffic = [
                {"kind": kind, "calls": calls, "nbytes": nbytes}
                for kind, calls, nbytes in traffic_of(job.model, ranks, tokens, job.element_size)
                if calls
            ]
            yield {"context": context, "ranks": ranks, "tokens": tokens, "problem": problem, "traffic": traffic}


def _chunks(estimator: Estimator, chosen: Setting) -> Iterator[dict[str, Any]]:
    """One MoE layer for every N, schedule and memory mode; without expert parallelism in the setting, EP of a node."""
    job = estimator.job
    if chosen.layout.ep == 1:
        chosen = dataclasses.replace(chosen, layout=chosen.layout._replace(ep=_node_ep(job, chosen.layout)))
    for schedule in SCHEDULES:
        for keep in KEEPS:
            for n in CANDIDATES:
                setting = dataclasses.replace(chosen, num_chunks=n, schedule=schedule, keep=keep)
                each, shape = estimator(setting), setting.layer(job)
                sent = exchanges(shape, num_chunks=n, keep=keep)
                yield {
                    "schedule": schedule,
                    "keep": keep,
                    "num_chunks": n,
                    "ep": shape.ep,
                    "rows": shape.tokens * shape.top_k,
                    "rows_per_expert": shape.tokens * shape.top_k // (n * shape.local_experts),
                    "resident_tokens": min(2, n) * -(-shape.tokens // n),
                    "exchanges": sent.calls,
                    "sent": sent.sent,
                    "kept": each.expert.kept,
                    "peak": each.expert.peak,
                    "forward": each.times.forward.total,
                    "backward": each.times.backward.total,
                    "exposed": each.times.exposed,
                    "communication": each.times.communication,
                }


def _node_ep(job: Job, layout: Layout) -> int:
    sizes = (ep for ep in range(job.devices_per_node, 0, -1) if layout.cp * layout.dp % ep == 0)
    return next(ep for ep in sizes if job.model.num_experts % ep == 0)
