"""Patches of MindSpeed-MM, one file per seam; installed as `mindspeed_chunk.patches`.

`install()` only sets post-import hooks. A patch is imported when the host's module is imported. A process that never
imports MindSpeed-MM imports no patch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from mindspeed_chunk.patches import settings
from mindspeed_chunk.patches.hooks import PostImport

if TYPE_CHECKING:
    from mindspeed_chunk.patches.record import Patch

    PATCHES: tuple[Patch, ...]

_FSDP = "mindspeed_mm.fsdp"
# The host's modules, and the files here with patches for each, in the order in which they apply. Before the host's
# module is imported, nothing else is known about a patch.
HOOKS: dict[str, tuple[str, ...]] = {
    f"{_FSDP}.params.parallel_args": ("config_name",),
    f"{_FSDP}.params.argument": ("start_checks",),
    f"{_FSDP}.distributed.parallel_state": ("parallel_state",),
    f"{_FSDP}.distributed.expert_parallel.expert_parallel": ("expert_parallel",),
    f"{_FSDP}.distributed.expert_parallel.ep_dispatcher": ("ep_dispatcher", "ep_chunkmoe"),
    f"{_FSDP}.features.memory.recompute": ("recompute",),
    f"{_FSDP}.features.communication.chunk_mbs": ("chunk_mbs",),
    f"{_FSDP}.features.apply_features": ("features_applier",),
    f"{_FSDP}.distributed.expert_parallel.comm": ("row_counts",),
}
# The same for a host on a CPU, with MINDSPEED_CHUNK_DEVICE=cpu: for tests, demos and examples, never for training.
ON_CPU: dict[str, tuple[str, ...]] = {
    f"{_FSDP}.utils.device": ("on_cpu.device",),
    f"{_FSDP}.features.memory.async_offload": ("on_cpu.device",),
    f"{_FSDP}.features.memory.grad_offload": ("on_cpu.device",),
}

_hooks: PostImport | None = None
_broken = False
_checked: list[Patch] = []  # patches whose module the host has imported, in that order


def install() -> None:
    """Apply each patch when the host's module is imported; a second call does no harm."""
    global _hooks
    if _hooks is not None or _broken or settings.disabled():
        return
    names = HOOKS | ON_CPU
    _hooks = PostImport(names, _on_import)
    sys.meta_path.insert(0, _hooks)
    for name in names:
        if name in sys.modules:
            _on_import(name, sys.modules[name])


def installed() -> bool:
    return _hooks is not None


def remove() -> None:
    """Undo every patch; the host is as it was."""
    global _hooks
    if _hooks is not None:
        with contextlib.suppress(ValueError):  # other code has removed it
            sys.meta_path.remove(_hooks)
        _hooks = None
    with contextlib.ExitStack() as last_first:  # each of them, even if another one fails
        while _checked:
            last_first.callback(_checked.pop(0).remove)


def _on_import(name: str, module: ModuleType) -> None:
    """Never raises: a fault in a plugin must not break an import of the host."""
    global _broken
    if _hooks is None:
        return
    try:
        _warn()
        for patch in _records(HOOKS.get(name) or (ON_CPU[name] if settings.on_cpu() else ())):
            if patch.module == name:
                _checked.append(patch)
                patch.on_import(module)
    except KeyboardInterrupt:  # the user wants to stop
        raise
    except BaseException as error:  # a SystemExit is no Exception
        _broken = True
        with contextlib.suppress(Exception):
            remove()  # with half of the patches, a run could differ from its yaml
        with contextlib.suppress(Exception):  # stderr may be closed
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            logging.getLogger("mindspeed_chunk").warning(
                "mindspeed_chunk is not available: %s (the package is %s)", cause, os.path.dirname(__path__[0])
            )


@functools.cache
def _warn() -> None:
    from mindspeed_chunk import copies
    from mindspeed_chunk.log import say

    for problem in (*copies.problems(), *settings.problems()):
        say(logging.WARNING, problem)


def _records(files: Iterable[str]) -> tuple[Patch, ...]:
    modules = [importlib.import_module(f"{__name__}.{file}") for file in files]
    return tuple(patch for module in modules for patch in vars(module).get("PATCHES") or (module.PATCH,))


if not TYPE_CHECKING:

    def __getattr__(name):
        """`PATCHES`: every record of HOOKS, in the order in which they apply, imported on first use."""
        if name != "PATCHES":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _records(dict.fromkeys(file for files in HOOKS.values() for file in files))
