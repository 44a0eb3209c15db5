"""Seams of MindSpeed-MM, one file each; installed as `mindspeed_chunk.patches`.

`install()` sets post-import hooks and nothing more: a process that never imports MindSpeed-MM never runs one.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

from mindspeed_chunk.patches import (
    chunk_mbs,
    config_name,
    cpu_device,
    ep_chunkmoe,
    ep_dispatcher,
    expert_parallel,
    features_applier,
    parallel_state,
    recompute,
    row_counts,
    settings,
    start_checks,
)
from mindspeed_chunk.patches.record import Patch

PATCHES: tuple[Patch, ...] = (
    *(
        module.PATCH
        for module in (
            config_name,
            start_checks,
            parallel_state,
            expert_parallel,
            ep_dispatcher,
            ep_chunkmoe,
            recompute,
            chunk_mbs,
            features_applier,
            row_counts,
        )
    ),
    *cpu_device.PATCHES,
)

_hooked = False
_active = False


def install() -> None:
    """Apply each patch when, or if, the host's module is imported; again does no harm."""
    global _hooked, _active
    if _active or settings.disabled():
        return
    _active = True
    if not _hooked:  # hooks cannot be unset, so they are set once and look at `_active`
        _hooked = True
        import wrapt

        for patch in PATCHES:
            wrapt.register_post_import_hook(partial(_on_import, patch), patch.module)
    else:
        import sys

        for patch in PATCHES:
            if patch.module in sys.modules:
                patch.on_import(sys.modules[patch.module])


def remove() -> None:
    """Take every patch back; the host is as it was."""
    global _active
    _active = False
    for patch in reversed(PATCHES):
        patch.take_back()


def _on_import(patch: Patch, module: ModuleType) -> None:
    if _active:
        patch.on_import(module)
