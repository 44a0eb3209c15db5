"""Lets the host's recomputation repeat Chunk MoE's forward with the plan it had: one gather and one host copy a layer.

The function is replaced only once a plan asks for Chunk MoE.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from types import ModuleType
from typing import Any

from mindspeed_chunk.patches.record import Drifted, Patch, Undo

_module: Any = None
_original = None


def check(module: ModuleType) -> Undo:
    """Look at what the module calls and remember it; nothing is changed yet."""
    from torch.utils.checkpoint import checkpoint

    global _module
    if getattr(module, "checkpoint", None) is not checkpoint:
        raise Drifted("another checkpoint")
    _module = module
    return _take_back


def use() -> None:
    """From now on the host's non-reentrant checkpoints replay plans."""
    global _original
    with contextlib.suppress(ImportError):  # a host without it has nothing to replace
        importlib.import_module(PATCH.module)
    if _module is None or _original is not None:
        return
    from mindspeed_chunk.moe.replay import replay_contexts

    original = _original = _module.checkpoint

    @functools.wraps(original)
    def checkpoint(*args, use_reentrant=None, **kwargs):
        if use_reentrant is False:
            kwargs.setdefault("context_fn", replay_contexts)
        return original(*args, use_reentrant=use_reentrant, **kwargs)

    _module.checkpoint = checkpoint


def _take_back() -> None:
    global _module, _original
    if _original is not None:
        _module.checkpoint = _original
    _module = _original = None


PATCH = Patch(
    name="recompute",
    module="mindspeed_mm.fsdp.features.memory.recompute",
    target="checkpoint",
    hosts="26.0.0, 26.1.0, master of 2026-08",
    expects="torch.utils.checkpoint.checkpoint, called as a name of the module",
    why="a recompute that routes otherwise than its forward would give wrong gradients, or hang",
    until="the host takes a context_fn",
    apply=check,
    asked_by="dispatcher: chunkmoe",
)
