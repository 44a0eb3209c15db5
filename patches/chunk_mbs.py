"""Runs our ChunkMBS in place of the host's `apply_chunkmbs_module`, and has the code that other hosts need for it, too.

Nothing is replaced unless `features.enable_chunk_mbs` is true, so other runs use the host's own code.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from mindspeed_chunk.config import ChunkMBSConfig, ConfigError
from mindspeed_chunk.log import say
from mindspeed_chunk.patches import settings
from mindspeed_chunk.patches.record import Drifted, Patch, Seam, Undo, signature_of

APPLIER = "mindspeed_mm.fsdp.features.apply_features"
_NAME = "apply_chunkmbs_module"
_PARAMETERS = ("chunk_mbs_modules", "chunkmbs_cfg")
_MARK = "_mindspeed_chunk_mbs"

_SEAM = Seam(_NAME, importers=(APPLIER,))


def check(module: ModuleType) -> Undo:
    """Check the signature and remember the module; change nothing yet."""
    original = getattr(module, _NAME)
    if tuple(inspect.signature(original).parameters) != _PARAMETERS:
        raise Drifted(f"{_NAME}{signature_of(original)}")
    return _SEAM.bind(module)


def activate(batch_sizes: Sequence[int], inner: Sequence[str]) -> None:
    """From now on the host's chunked modules run our ChunkMBS.

    Args:
        batch_sizes, inner: see `wrap`.

    Raises:
        ConfigError: if the host would not call our function.
    """

    def ours(original: Callable) -> Callable:
        @functools.wraps(original)
        def apply_chunkmbs_module(chunk_mbs_modules: Any, chunkmbs_cfg: Any) -> None:
            config = ChunkMBSConfig.from_mapping(settings.section_mapping(chunkmbs_cfg))
            wrap(chunk_mbs_modules, config, batch_sizes, inner)

        return apply_chunkmbs_module

    _SEAM.replace(ours)
    if getattr(sys.modules.get(APPLIER), _NAME, None) is not getattr(_SEAM.owner, _NAME):
        _SEAM.restore()
        raise ConfigError(
            f"features.enable_chunk_mbs: True: {PATCH.name} ({PATCH.module}.{PATCH.target}): drifted: expected "
            f"{APPLIER} to call it by this name, found another call; {settings.CHUNK_MBS}=host runs the host's own"
        )


def wrap(
    named: Iterable[tuple[str, Any]], config: ChunkMBSConfig, batch_sizes: Sequence[int], inner: Sequence[str]
) -> None:
    """Run these modules' batches as micro-chunks, around the current `forward`; each module once.

    Args:
        batch_sizes: those of the yaml, for training and validation.
        inner: the yaml's keys of the features that must have wrapped the modules before, to see micro-chunks.

    Raises:
        ConfigError: for a module that nothing has wrapped although `inner` is not empty, and for a module inside
            another one.
    """
    import torch.distributed as dist

    from mindspeed_chunk.mbs.block import ChunkMBS, check_order, transformers_outputs

    once = {id(module): (name, module) for name, module in reversed(list(named))}  # the first name stays
    modules = [pair for pair in reversed(once.values()) if not hasattr(pair[1].forward, _MARK)]
    check_order((), (), [name for name, _ in modules])
    bare = [name for name, module in modules if "forward" not in vars(module)]
    if inner and bare:
        raise ConfigError.about(
            "features.chunkmbs_plan.apply_modules",
            bare,
            f"wrapped by ChunkMBS before or without {' and '.join(inner)}, which must be inside it",
            "name the same modules in both",
        )
    group = dist.group.WORLD if dist.is_initialized() else None
    chunk_mbs = ChunkMBS(config, batch_sizes=batch_sizes, group=group, side_outputs=[transformers_outputs])
    for name, module in modules:
        module.forward = chunk_mbs.wrap(name, module.forward, types.MethodType(type(module).forward, module))
        setattr(module.forward, _MARK, True)
    if modules:
        say(logging.INFO, f"ChunkMBS is on, for {len(modules)} modules: {config}")


PATCH = Patch(
    name="ChunkMBS",
    module="mindspeed_mm.fsdp.features.communication.chunk_mbs",
    target=_NAME,
    hosts="26.1.0, master of 2026-08, newest master",
    expects=f"{_NAME}({', '.join(_PARAMETERS)}), called after recompute and activation offload",
    why="arguments that the host does not cut, outputs that it cannot join, settings that it does not check",
    until="the host's own has none of these faults",
    apply=check,
    enabled_by="features.enable_chunk_mbs: true",
)
