"""ChunkMBS for a host that lacks it (26.0): applied after the host's features, so that it wraps them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from mindspeed_chunk.config import ChunkMBSConfig, ConfigError
from mindspeed_chunk.patches import chunk_mbs
from mindspeed_chunk.patches.record import Drifted, NotNeeded, Patch, Seam, Undo, signature_of

_SEAM = Seam("__call__")


def check(module: ModuleType) -> Undo:
    """Check the class and remember it; change nothing yet."""
    applier = module.FeaturesApplier
    if hasattr(applier, "apply_chunk_mbs"):
        raise NotNeeded("the host has its own ChunkMBS")
    call = applier.__call__
    if tuple(inspect.signature(call).parameters) != ("self", "model") or not hasattr(applier, "get_needed_modules"):
        raise Drifted(f"FeaturesApplier.__call__{signature_of(call)}")
    return _SEAM.bind(applier)


def activate(config: ChunkMBSConfig, batch_sizes: Sequence[int], inner: Sequence[str]) -> None:
    """From now on the host's features end with ChunkMBS; for the arguments see `chunk_mbs.wrap`."""

    def ending_with_ours(original: Callable) -> Callable:
        @functools.wraps(original)
        def __call__(self: Any, model: Any) -> None:
            original(self, model)
            modules = self.get_needed_modules(model, config.apply_modules)
            if not modules:
                raise ConfigError.about(
                    "features.chunkmbs_plan.apply_modules",
                    list(config.apply_modules),
                    "no module of the model has such a name",
                    "correct it",
                )
            chunk_mbs.wrap(modules, config, batch_sizes, inner)

        return __call__

    _SEAM.replace(ending_with_ours)


PATCH = Patch(
    name="features",
    module=chunk_mbs.APPLIER,
    target="FeaturesApplier.__call__",
    hosts="26.0.0",
    expects="FeaturesApplier.__call__(self, model), called after recompute and FSDP2; get_needed_modules",
    why="the host has no ChunkMBS",
    until="26.0 is not supported any more",
    apply=check,
    enabled_by="features.enable_chunk_mbs: true",
)
