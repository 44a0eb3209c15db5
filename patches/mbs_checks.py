"""Checks a configuration that asks for ChunkMBS as soon as the host has read it, before the first collective.

What only a call can tell, the sizes of arguments above all, is checked at the first one by `mindspeed_chunk.mbs`.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_chunk.config import ChunkMBSConfig, ConfigError
from mindspeed_chunk.patches import chunk_mbs, features_applier, row_counts, settings
from mindspeed_chunk.patches.record import APPLIED, log_once

ENABLE = "features.enable_chunk_mbs"
PLAN = "features.chunkmbs_plan"
HOOKS = "parallel.fsdp_plan.hook_modules"
_WILDCARDS = re.compile(r"(\{\*\}|\{\d+-\d+\}|\*|\?)")


def check(arguments: object) -> None:
    """Raises ConfigError. Does nothing for a configuration that does not ask for ChunkMBS."""
    features = settings.features(arguments)
    asked = features.get("enable_chunk_mbs", False)
    if not isinstance(asked, bool):
        raise ConfigError.about(ENABLE, asked, "must be a boolean", "write true or false, without quotes")
    if not asked:
        return
    importlib.import_module(features_applier.PATCH.module)
    own = _imported(chunk_mbs.PATCH.module)
    if settings.host_chunk_mbs_chosen():
        if not own:
            raise ConfigError.about(settings.CHUNK_MBS, "host", "this host has no ChunkMBS of its own", "unset it")
        # a warning, since at this time the host has not set its log level yet
        log_once(logging.WARNING, f"mindspeed_chunk: {settings.CHUNK_MBS}=host: the host's own ChunkMBS runs")
        return
    seam = chunk_mbs if own else features_applier
    if seam.PATCH.state != APPLIED:
        way_out = f"{settings.CHUNK_MBS}=host runs the host's own" if own else "set it to false"
        raise ConfigError(f"{ENABLE}: True: {seam.PATCH}; {way_out}")
    config = _config(features.get("chunkmbs_plan", {}))
    _check_neighbours(features)
    _count_rows(arguments.parallel)
    _check_hooks(arguments.parallel, config.apply_modules)
    inner = _check_inner(_inner(arguments, features), config.apply_modules)
    sizes = (getattr(arguments.training, name, None) for name in ("micro_batch_size", "val_micro_batch_size"))
    sizes = tuple(size for size in sizes if size)
    if own:
        chunk_mbs.use(sizes, inner)
    else:
        features_applier.use(config, sizes, inner)


def _imported(module: str) -> bool:
    """The host's modules behind ChunkMBS are looked at now, not in the middle of a run. False where there is none."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        return False
    return True


def _config(plan: object) -> ChunkMBSConfig:
    if isinstance(plan, Mapping) and not plan.get("apply_modules"):
        raise ConfigError.about(
            f"{PLAN}.apply_modules",
            plan.get("apply_modules"),
            "ChunkMBS needs the names of the blocks",
            "write for example [model.language_model.layers.{*}]",
        )
    return ChunkMBSConfig.from_mapping(plan, PLAN)


def _check_neighbours(features: Mapping[str, object]) -> None:
    """Features that ChunkMBS does not work with, by the key that turns them on."""
    if (features.get("loss_cfg") or {}).get("router_aux_loss_offload"):
        raise ConfigError.about(
            "features.loss_cfg.router_aux_loss_offload",
            True,
            "counts one call of each router a step, and ChunkMBS makes one a micro-chunk",
            "set it to false",
        )


def _count_rows(parallel: object) -> None:
    """The host's allgather must know how many rows a micro-chunk has on each rank."""
    if parallel.ep_plan.dispatcher != "allgather" or not _imported(row_counts.PATCH.module):
        return
    if row_counts.PATCH.state != APPLIED:
        raise ConfigError(f"parallel.ep_plan.dispatcher: allgather: {row_counts.PATCH}; use alltoall with ChunkMBS")
    row_counts.use()


def _inner(arguments: object, features: Mapping[str, object]) -> dict[str, Sequence[str] | None]:
    """Modules that are recomputed and offloaded, by the key that turns it on; None where it is off."""
    if "activation_offload_plan" in features:  # since 26.1
        return {
            f"features.{switch}": (features[plan]["apply_modules"] or []) if features.get(switch) else None
            for switch, plan in (
                ("recompute", "recompute_plan"),
                ("enable_activation_offload", "activation_offload_plan"),
            )
        }
    parallel, offload = arguments.parallel, getattr(arguments.model, "_extra_fields", {}).get("activation_offload_plan")
    return {
        "parallel.recompute": parallel.recompute_plan.apply_modules if parallel.recompute else None,
        "model.activation_offload_plan": offload.get("apply_modules") if isinstance(offload, Mapping) else None,
    }


def _check_inner(inner: Mapping[str, Sequence[str] | None], blocks: Sequence[str]) -> list[str]:
    """Every block must be recomputed and offloaded as well, where these are on. Returns the keys that are on."""
    for switch, patterns in inner.items():
        missing = [block for block in blocks if patterns is not None and not _covered(block, patterns)]
        if missing:
            names = f"{_plan_of(switch)}.apply_modules"
            raise ConfigError.about(
                f"{PLAN}.apply_modules", missing, f"must be in {names}, too", f"add them to {names}"
            )
    off = [switch for switch, patterns in inner.items() if patterns is None]
    if off:
        rule = "without it every micro-chunk's activations stay on the device, and ChunkMBS saves little memory"
        error = ConfigError.about(" and ".join(off), "off", rule, f"turn it on for the modules of {PLAN}")
        if settings.strict():
            raise error
        log_once(logging.WARNING, f"mindspeed_chunk: {error}")
    return [switch for switch, patterns in inner.items() if patterns is not None]


def _plan_of(switch: str) -> str:
    return {
        "features.recompute": "features.recompute_plan",
        "features.enable_activation_offload": "features.activation_offload_plan",
        "parallel.recompute": "parallel.recompute_plan",
    }.get(switch, switch)


def _check_hooks(parallel: object, blocks: Sequence[str]) -> None:
    """FSDP2 units inside of a block must be gathered with the block, not once a micro-chunk."""
    fsdp, ep = getattr(parallel, "fsdp_plan", None), parallel.ep_plan
    units = list(getattr(fsdp, "apply_modules", None) or [])
    if parallel.expert_parallel_size > 1:
        units += ep.apply_efsdp_modules or ep.apply_modules
    hooks = list(getattr(fsdp, "hook_modules", None) or [])
    inside = []
    for unit in dict.fromkeys(units):
        for name in _examples(unit):
            block = min(_prefixes(name, blocks), default=None)
            hook = max(_prefixes(name, hooks), default=0)  # the host takes the innermost
            if block is not None and block < name.count(".") + 1 and not 0 < hook <= block:
                inside.append(unit)
                break
    if inside:
        raise ConfigError.about(
            HOOKS,
            hooks,
            f"{', '.join(inside)} are FSDP units inside of blocks of {PLAN}, and would be gathered once a micro-chunk",
            f"list {', '.join(blocks)}, and nothing inside of them",
        )


def _prefixes(name: str, patterns: Sequence[str]) -> Iterator[int]:
    """How many segments of the name make a name that one of the patterns matches."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if any(re.fullmatch(_regex(pattern), ".".join(parts[:count])) for pattern in patterns):
            yield count


def _covered(pattern: str, by: Sequence[str]) -> bool:
    """Whether what the pattern matches is matched by the others; `{*}` is tried with 0, for there may be one layer."""
    return all(any(re.fullmatch(_regex(other), name) for other in by) for name in _examples(pattern))


def _examples(pattern: str) -> list[str]:
    """Names that the pattern matches: all numbers of a range, something for each other wildcard."""
    return ["".join(parts) for parts in itertools.product(*map(_choices, _WILDCARDS.split(pattern)))]


def _choices(part: str) -> list[str]:
    if re.fullmatch(r"\{\d+-\d+\}", part):
        first, last = map(int, part[1:-1].split("-"))
        return [str(number) for number in range(first, last + 1)]
    return {"{*}": ["0"], "*": ["0"], "?": ["0"]}.get(part, [part])


def _regex(pattern: str) -> str:
    """The host's wildcards: `{*}` any number, `{2-5}` one of a range, `*` anything, `?` one character."""
    parts = {"{*}": r"\d+", "*": ".*", "?": "."}
    return "".join(
        parts.get(part) or (f"(?:{'|'.join(_choices(part))})" if _WILDCARDS.fullmatch(part) else re.escape(part))
        for part in _WILDCARDS.split(pattern)
    )
