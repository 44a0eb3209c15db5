"""Makes the host's recompute repeat Chunk MoE's forward with the same plan: one gather and one host copy per layer.

The function is replaced only when a plan turns Chunk MoE on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspeed_chunk.patches.record import Drifted, Patch, Seam, Undo

_SEAM = Seam("checkpoint")


def check(module: ModuleType) -> Undo:
    """Check what the module calls and remember it; change nothing yet."""
    from torch.utils.checkpoint import checkpoint

    if getattr(module, "checkpoint", None) is not checkpoint:
        raise Drifted("another checkpoint")
    return _SEAM.bind(module)


def activate() -> None:
    """From now on the host's checkpoints replay plans."""
    with contextlib.suppress(ImportError):  # a host without this module has nothing to replace
        importlib.import_module(PATCH.module)
    if _SEAM.owner is not None and not _SEAM.replaced:
        _SEAM.replace(_replaying)


def _replaying(original: Callable) -> Callable:
    from mindspeed_chunk.moe.replay import replay_beside, replay_contexts, replayed

    @functools.wraps(original)
    def checkpoint(function: Callable, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
        if use_reentrant is False:
            theirs = kwargs.get("context_fn")
            kwargs["context_fn"] = replay_beside(theirs) if theirs else replay_contexts
        else:
            function = replayed(function)
        return original(function, *args, use_reentrant=use_reentrant, **kwargs)

    return checkpoint


PATCH = Patch(
    name="recompute",
    module="mindspeed_mm.fsdp.features.memory.recompute",
    target="checkpoint",
    hosts="26.0.0, 26.1.0, master of 2026-08, newest master",
    expects="torch.utils.checkpoint.checkpoint, called as a name of the module",
    why="a recompute with other routes than its forward would give wrong gradients, or hang",
    until="the host takes a context_fn",
    apply=check,
    enabled_by="dispatcher: chunkmoe",
)
