"""Checks of a configuration with ChunkMBS, before a model is built.

Each function raises a ConfigError for one kind of mistake; the caller decides whether that ends a run. This module does
not import torch: the host's start, the embedded trainer and the command line all call it. What is known only in a call,
such as the sizes of arguments, is checked in the first call. `block.check_order` checks names of modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from mindspeed_chunk.config import ChunkMBSConfig, ConfigError
from mindspeed_chunk.names import covered, prefixes, read_patterns
from mindspeed_chunk.values import Get

ENABLE = "features.enable_chunk_mbs"
MBS_PLAN = "features.chunkmbs_plan"
BLOCKS = f"{MBS_PLAN}.apply_modules"
LOSS = "features.loss_cfg.router_aux_loss_offload"
HOOKS = "parallel.fsdp_plan.hook_modules"

# A layer of MindSpeed-MM's newest master that is cut along the sequence.
CHUNK_LAYER = "features.enable_chunk_layer"

# Names of arguments: offsets of packed samples, and masks that contain them. Such a batch is not a stack of samples.
PACKED = re.compile(r"cu_?seq_?len|max_length_[qk]$|^block_mask$", re.IGNORECASE)
# One row per visual token of the batch; another argument says how many of them a sample has.
VISUAL_ROWS = re.compile(r"^deepstack_", re.IGNORECASE)

# Modules that are recomputed or offloaded, by the key that turns it on; None if it is off.
Inner = Mapping[str, Sequence[str] | None]

# What may be on around the blocks. Each with its key in MindSpeed-MM 26.0.
SWITCHES = {
    "features.recompute": "parallel.recompute",
    "features.enable_activation_offload": "model.activation_offload_plan",
}
_PLANS = {
    "features.recompute": "features.recompute_plan",
    "features.enable_activation_offload": "features.activation_offload_plan",
    "parallel.recompute": "parallel.recompute_plan",
}


def names_key(switch: str) -> str:
    """The list of modules that belongs to a key of `Inner`."""
    return f"{_PLANS.get(switch, switch)}.apply_modules"


def inner(get: Get, switches: Iterable[str]) -> Inner:
    """The modules of each of the switches."""
    return {switch: (get(names_key(switch)) or []) if get(switch) else None for switch in switches}


def units(get: Get) -> dict[str, Sequence[str]]:
    """Names of FSDP2 units, by the list of the yaml that has them."""
    paths = ["parallel.fsdp_plan.apply_modules"]
    if (get("parallel.expert_parallel_size") or 1) > 1:
        efsdp, experts = (f"parallel.ep_plan.{key}" for key in ("apply_efsdp_modules", "apply_modules"))
        paths.append(efsdp if get(efsdp) else experts)
    return {path: get(path) or [] for path in paths}


def read_config(mbs_plan: object) -> ChunkMBSConfig:
    """The settings of a run with ChunkMBS."""
    if isinstance(mbs_plan, Mapping) and not mbs_plan.get("apply_modules"):
        rule, way_out = "ChunkMBS needs the names of the blocks", "for Qwen3.5-MoE: model.language_model.layers.{*}"
        raise ConfigError.about(BLOCKS, mbs_plan.get("apply_modules"), rule, way_out)
    return ChunkMBSConfig.from_mapping(mbs_plan, MBS_PLAN)


def check_chunk_layer(get: Get) -> None:
    if get(CHUNK_LAYER):
        rule = "cuts a layer along the sequence, which has not been tested with this plugin's ChunkMBS"
        raise ConfigError.about(CHUNK_LAYER, get(CHUNK_LAYER), rule, "turn it off, or set MINDSPEED_CHUNK_MBS=host")


def check_named(names: Sequence[str]) -> None:
    """`names`: those of arguments that have the batch."""
    wrong = [name for name in names if PACKED.search(name) or VISUAL_ROWS.search(name)]
    if wrong:
        rule = "its rows are packed and are not samples, so the first call with it fails"
        way_out = "remove it; if the model passes it, turn ChunkMBS off (features.enable_chunk_mbs: false)"
        raise ConfigError.about(f"{MBS_PLAN}.chunk_kwarg_names", wrong, rule, way_out)


def check_loss(get: Get) -> None:
    if get(LOSS):
        raise ConfigError.about(
            LOSS,
            True,
            "expects one call of each router per step, but ChunkMBS makes one per micro-chunk",
            "set it to false",
        )


def not_covered(switch: str, texts: Sequence[str], blocks: Sequence[str]) -> list[str]:
    """The blocks that are not among the modules of a key of `Inner`."""
    others = read_patterns(texts, names_key(switch))
    return [pattern.text for pattern in read_patterns(blocks, BLOCKS) if not covered(pattern, others)]


def check_covered(inner: Inner, blocks: Sequence[str]) -> None:
    """Every block must be recomputed if recompute is on, and offloaded if offload is on."""
    for switch, texts in inner.items():
        names = names_key(switch)
        missing = not_covered(switch, texts, blocks) if texts is not None else []
        if missing:
            raise ConfigError.about(
                BLOCKS, missing, f"must be in {names}, too", f"correct the name, or add it to {names}"
            )


def check_memory(inner: Inner) -> None:
    """Recompute and offload should be on."""
    off = [switch for switch, patterns in inner.items() if patterns is None]
    if off:
        rule = "without it every micro-chunk's activations stay on the device, and ChunkMBS saves little memory"
        error = ConfigError.about(" and ".join(off), "off", rule, f"turn it on for the modules of {MBS_PLAN}")
        error.path = off[0]
        raise error


def check_hooks(units: Mapping[str, Sequence[str]], hooks: Sequence[str], blocks: Sequence[str]) -> None:
    """FSDP2 units inside a block must be gathered with the block, not once per micro-chunk.

    `units`: their names, by the list of the yaml that has them.
    """
    block_patterns, hook_patterns = read_patterns(blocks, BLOCKS), read_patterns(hooks, HOOKS)

    def apart(name: str) -> bool:
        block = min(prefixes(name, block_patterns), default=None)
        hook = max(prefixes(name, hook_patterns), default=0)  # the host uses the innermost one
        return block is not None and block < name.count(".") + 1 and not 0 < hook <= block

    known = [*block_patterns, *hook_patterns]
    patterns = [pattern for path, texts in units.items() for pattern in read_patterns(texts, path)]
    inside = list(dict.fromkeys(each.text for each in patterns if any(map(apart, each.examples(known)))))
    if inside:
        raise ConfigError.about(
            HOOKS,
            list(hooks),
            f"{', '.join(inside)} are FSDP units inside blocks of {MBS_PLAN}, and would be gathered once per "
            "micro-chunk",
            f"list {', '.join(blocks)}, and no modules inside them",
        )


def check_size(chunk_mbs: int, micro_batch_size: int) -> None:
    if chunk_mbs >= micro_batch_size:
        path = f"{MBS_PLAN}.chunk_mbs"
        rule = f"no effect, because training.micro_batch_size is {micro_batch_size}"
        raise ConfigError(f"{path}: {chunk_mbs}: {rule}", path)
