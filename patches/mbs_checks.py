"""Checks a configuration with ChunkMBS as soon as the host has read it, before the first collective.

What is known only in a call, such as the sizes of arguments, is checked in the first call by `mindspeed_chunk.mbs`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from mindspeed_chunk.config import FLAG, ConfigError
from mindspeed_chunk.log import say
from mindspeed_chunk.mbs import checks
from mindspeed_chunk.mbs.checks import ENABLE
from mindspeed_chunk.patches import chunk_mbs, features_applier, row_counts, settings
from mindspeed_chunk.patches.record import APPLIED


def check(arguments: Any) -> None:
    """Raises ConfigError. Does nothing for a configuration without ChunkMBS."""
    get = functools.partial(settings.value_at, arguments)
    if not FLAG.take(ENABLE, get(ENABLE, False)):
        return
    importlib.import_module(features_applier.PATCH.module)
    own = _imported(chunk_mbs.PATCH.module)
    if settings.host_chunk_mbs_chosen():
        if not own:
            raise ConfigError.about(settings.CHUNK_MBS, "host", "this host does not have its own ChunkMBS", "unset it")
        # a warning, because the host has not set its log level yet
        say(logging.WARNING, f"{settings.CHUNK_MBS}=host: the host's own ChunkMBS runs")
        return
    seam = chunk_mbs if own else features_applier
    if seam.PATCH.state != APPLIED:
        way_out = f"{settings.CHUNK_MBS}=host runs the host's own" if own else "set it to false"
        raise ConfigError(f"{ENABLE}: True: {seam.PATCH}; {way_out}")
    config = checks.read_config(get(checks.MBS_PLAN, {}))
    checks.check_chunk_layer(get)
    checks.check_loss(get)
    _count_rows(arguments.parallel)
    checks.check_hooks(checks.units(get), get(checks.HOOKS, []), config.apply_modules)
    since_26_1 = get("features.activation_offload_plan") is not None
    wrappers = checks.inner(get, checks.SWITCHES.keys() if since_26_1 else checks.SWITCHES.values())
    checks.check_covered(wrappers, config.apply_modules)
    inner = _check_memory(wrappers)
    given = map(get, ("training.micro_batch_size", "training.val_micro_batch_size"))
    sizes = tuple(size for size in given if size)
    if own:
        chunk_mbs.activate(sizes, inner)
    else:
        features_applier.activate(config, sizes, inner)


def _imported(module: str) -> bool:
    """Import the host's modules for ChunkMBS now, not in the middle of a run. False if there is none."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        return False
    return True


def _count_rows(parallel: Any) -> None:
    """The host's allgather must know the number of rows of a micro-chunk on each rank."""
    if parallel.ep_plan.dispatcher != "allgather" or not _imported(row_counts.PATCH.module):
        return
    if row_counts.PATCH.state != APPLIED:
        raise ConfigError(f"parallel.ep_plan.dispatcher: allgather: {row_counts.PATCH}; use alltoall with ChunkMBS")
    row_counts.activate()


def _check_memory(inner: checks.Inner) -> list[str]:
    """Returns the keys that are on. A key that is off ends the run only with MINDSPEED_CHUNK_STRICT=1."""
    try:
        checks.check_memory(inner)
    except ConfigError as error:
        if settings.strict():
            raise
        say(logging.WARNING, str(error))
    return [switch for switch, patterns in inner.items() if patterns is not None]
