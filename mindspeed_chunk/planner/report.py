"""Everything that `mindspeed-chunk plan` tells about a job, as one dictionary of plain values.

The terminal's tables, the json output and the page are three renderings of it. Bytes are integers, times are seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mindspeed_chunk.config import KEEPS, SCHEDULES
from mindspeed_chunk.hardware import ALL_GATHER, REDUCE_SCATTER
from mindspeed_chunk.planner.activations import POLICIES, activations, block_bytes
from mindspeed_chunk.planner.estimate import Estimate, Estimator
from mindspeed_chunk.planner.fragments import fragments
from mindspeed_chunk.planner.layout import KINDS, Layout, layouts
from mindspeed_chunk.planner.precision import RECIPES
from mindspeed_chunk.planner.recommend import CHUNKS, Recommendation, best_of, recommend
from mindspeed_chunk.planner.sequence import CONTEXTS, context_problem, context_traffic
from mindspeed_chunk.planner.setting import MEGATRON, Job, Setting
from mindspeed_chunk.planner.state import Sharding, state_bytes
from mindspeed_chunk.planner.traffic import exchanges

_SHOWN_LAYOUTS = 6
_MEGATRON_BATCHES = (1, 2, 4)
_PAIR = ((1, 4), (2, 8))  # (part of a node that TP takes, PP): the two ways to lay out several nodes that are compared


def make_report(job: Job) -> dict[str, Any]:
    """Raises ConfigError where no plan can be made."""
    estimator = Estimator(job)
    found = recommend(job, estimator)
    chosen = found.best or found.smallest
    return {
        "job": _job(job),
        "recommendation": _recommendation(job, found),
        "layouts": list(_layouts(job, estimator, found)),
        "precision": list(_precision(job, chosen.setting)),
        "batch": list(_batch(estimator, chosen.setting)),
        "activations": list(_activations(estimator, chosen)),
        "sequence": list(_sequence(job)),
        "chunks": list(_chunks(estimator, chosen.setting)),
        "yaml": fragments(job, chosen.setting) if found.best else None,
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
        "memory": round(device.memory),
        "budget": round(job.budget),
        "nodes": job.nodes,
        "devices_per_node": job.devices_per_node,
        "sequence": job.sequence,
        "global_batch": job.global_batch,
        "recipe": job.recipe.name,
        "imbalance": job.imbalance,
    }


def _told(each: Estimate) -> dict[str, Any]:
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
    }


def _recommendation(job: Job, found: Recommendation) -> dict[str, Any]:
    return {
        "fits": found.best is not None,
        "best": _told(found.best) if found.best else None,
        "least_memory": _told(found.smallest),
        "runners_up": [_told(each) for each in found.runners_up],
        "why": found.why,
    }


def _layouts(job: Job, estimator: Estimator, found: Recommendation) -> Iterator[dict[str, Any]]:
    """The chosen one, the pair of 3D layouts side by side, and the fastest others, those that fit first.

    Each with its own best setting, those with TP or PP of what `_megatron` tries.
    """
    model, chosen = job.model, (found.best or found.smallest).setting
    yield _layout(job, estimator, chosen, "recommended" if found.best else "least memory")
    pair = [_pair_layout(job, *sizes) for sizes in _PAIR]
    for layout, problem in pair:
        if problem:
            yield {"title": str(layout), "role": "3D", "problem": problem}
        else:
            yield _layout(job, estimator, _megatron(job, estimator, layout).setting, "3D")
    sizes = {"heads": model.num_attention_heads, "layers": model.num_hidden_layers, "experts": model.num_experts}
    valid = [layout for layout in layouts(job.world, **sizes) if _problem(job, layout) is None]
    shown = {chosen.layout, *(layout for layout, _ in pair)}
    others = [each for layout, each in found.of_layout.items() if layout not in shown]
    others += [
        _megatron(job, estimator, layout) for layout in valid if layout.tp * layout.pp > 1 and layout not in shown
    ]
    others.sort(key=lambda each: (each.peak > job.budget, each.step))
    for each in others[:_SHOWN_LAYOUTS]:
        yield _layout(job, estimator, each.setting, "other")


def _megatron(job: Job, estimator: Estimator, layout: Layout) -> Estimate:
    """The best of a few micro batches, with and without recompute; one chunk, since that back end has no Chunk MoE."""
    samples = job.global_batch // layout.dp
    tried = [
        estimator(
            Setting(layout=layout, backend=MEGATRON, micro_batch=size, accumulation=samples // size, policy=policy)
        )
        for size in _MEGATRON_BATCHES
        if samples % size == 0
        for policy in ("none", "full")
    ]
    return best_of(job, tried)


def _pair_layout(job: Job, part: int, pp: int) -> tuple[Layout, str | None]:
    tp = max(1, job.devices_per_node // part)
    layout = Layout(tp=tp, dp=max(1, job.world // (tp * pp)), pp=pp)
    if layout.world != job.world:
        return layout, f"TP x PP = {tp * pp} does not divide {job.world} ranks"
    return layout, _problem(job, layout)


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
    return context_problem(model, CONTEXTS[0], layout.cp, job.sequence)


def _layout(job: Job, estimator: Estimator, setting: Setting, role: str) -> dict[str, Any]:
    layout, nodes = setting.layout, job.devices_per_node
    groups = {kind: layout.groups(kind) for kind in KINDS if layout.size(kind) > 1}
    return _told(estimator(setting)) | {
        "role": role,
        "groups": {kind: [list(group) for group in found] for kind, found in groups.items()},
        "inside_node": {kind: layout.inside_node(kind, nodes) for kind in groups},
        "traffic": [
            each._asdict() | {"seconds": each.seconds(layout, nodes, job.device)} for each in estimator.traffic(setting)
        ],
    }


def _precision(job: Job, chosen: Setting) -> Iterator[dict[str, Any]]:
    for recipe in RECIPES.values():
        sharding = Sharding(job.world, chosen.layout.ep, train_vision=job.train_vision)
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
    ways = {"accumulation": Setting(**{**chosen.__dict__, "micro_batch": size, "accumulation": passes, "chunk_mbs": 0})}
    if passes > 1:
        policy = "offload" if chosen.policy == "none" else chosen.policy
        changes = {"micro_batch": size * passes, "accumulation": 1, "chunk_mbs": size, "policy": policy}
        ways["ChunkMBS"] = Setting(**{**chosen.__dict__, **changes})
    for name, setting in ways.items():
        traffic, told = estimator.traffic(setting), _told(estimator(setting))
        for key, kind in (("gathers", ALL_GATHER), ("reduce_scatters", REDUCE_SCATTER)):
            found = [each for each in traffic if each.kind == kind]
            told |= {key: sum(each.calls for each in found), f"{key}_bytes": sum(each.nbytes for each in found)}
        yield told | {"name": name}


def _activations(estimator: Estimator, chosen: Estimate) -> Iterator[dict[str, Any]]:
    job, setting = estimator.job, chosen.setting
    block = block_bytes(job.model, setting.tokens(job), job.element_size, chosen.expert, setting.layout.tp)
    for policy in POLICIES:
        found = activations(policy, block, job.model.num_hidden_layers, estimator.core_share())
        yield {"policy": policy} | found._asdict()


def _sequence(job: Job) -> Iterator[dict[str, Any]]:
    for context in CONTEXTS:
        for ranks in (2, 4, 8):
            problem = context_problem(job.model, context, ranks, job.sequence)
            tokens = -(-job.sequence // ranks)  # of the rank with the most
            traffic = [
                {"kind": kind, "calls": calls, "nbytes": nbytes}
                for kind, calls, nbytes in context_traffic(job.model, context, ranks, tokens, job.element_size)
                if calls
            ]
            yield {"context": context, "ranks": ranks, "tokens": tokens, "problem": problem, "traffic": traffic}


def _chunks(estimator: Estimator, chosen: Setting) -> Iterator[dict[str, Any]]:
    """One MoE layer for every N, schedule and memory mode; of a setting without expert parallelism, with one node's."""
    job = estimator.job
    if chosen.layout.ep == 1:
        chosen = dataclasses.replace(chosen, layout=chosen.layout._replace(ep=_node_ep(job, chosen.layout)))
    for schedule in SCHEDULES:
        for keep in KEEPS:
            for n in CHUNKS:
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
