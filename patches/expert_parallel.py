"""Binds experts to Chunk MoE if their plan turns it on; the models then see a plan with plain all-to-all."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from mindspeed_chunk.config import ChunkMoEConfig
from mindspeed_chunk.log import say
from mindspeed_chunk.moe.checks import NAME
from mindspeed_chunk.patches import config_name, ep_dispatcher, recompute, settings
from mindspeed_chunk.patches.record import NOT_NEEDED, Drifted, Patch, Seam, Undo, signature_of

_SEAM = Seam("expert_parallelize_modules", importers=("mindspeed_mm.fsdp.distributed.torch_parallelize",))


def apply(module: Any) -> Undo:
    original = module.expert_parallelize_modules
    if tuple(inspect.signature(original).parameters) != ("modules", "ep_mesh", "plan"):
        raise Drifted(f"expert_parallelize_modules{signature_of(original)}")
    undo = _SEAM.bind(module)
    _SEAM.replace(_bound)
    return undo


def _bound(original: Callable) -> Callable:
    @functools.wraps(original)
    def expert_parallelize_modules(modules: Any, ep_mesh: Any, plan: Any) -> Any:
        if plan.dispatcher != NAME:
            return original(modules, ep_mesh, plan)
        if settings.host_dispatcher_chosen():
            say(logging.INFO, f"{settings.DISPATCHER}=host: the host's own {NAME} runs")
            return original(modules, ep_mesh, plan)
        return original(modules, ep_mesh, _bind(modules, ep_mesh.get_group(), plan))

    return expert_parallelize_modules


def _bind(model: Any, group: Any, ep_plan: Any) -> Any:
    """Send the group's calls to our dispatcher; return the plan that the models get."""
    from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher

    config = ChunkMoEConfig.from_mapping(settings.section_mapping(ep_plan))
    if config.chunk_moe_overlap_shared_expert:
        from mindspeed_chunk.moe.shared_expert import overlap_shared_expert

        overlap_shared_expert(model)
    # gate_up_proj [E, H, 2I] and down_proj [E, I, H] in every model of the host
    ep_dispatcher.activate(group, ChunkMoEDispatcher(config, weight_layout="LHF"))
    recompute.activate()
    say(logging.INFO, f"Chunk MoE is on: {config}")
    if config_name.PATCH.state == NOT_NEEDED:
        choice = f"{settings.DISPATCHER}=host chooses it"
        say(logging.INFO, f"the host's own {NAME} is not used ({choice})")
    seen = copy.copy(ep_plan)
    seen.dispatcher = settings.plain_name(type(ep_plan))
    return seen


PATCH = Patch(
    name="expert-parallel plan",
    module="mindspeed_mm.fsdp.distributed.expert_parallel.expert_parallel",
    target="expert_parallelize_modules",
    hosts="26.0.0, 26.1.0, master of 2026-08, newest master",
    expects="expert_parallelize_modules(modules, ep_mesh, plan)",
    why="the only place with a module's plan and its group, before any model reads the dispatcher's name",
    until="the host has a registry of dispatchers",
    apply=apply,
)
