"""The keys that rules read, with the types that the host gives them, and the other keys of the same sections.

A key that is not here is left alone: every section of the host admits extra keys. Types are read as leniently as the
host's pydantic reads them ("2" is 2), but for true, which is no number here; those of Chunk MoE, which the host hands
on as they are, as strictly as `ChunkMoEConfig` does.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Callable
from typing import Any

from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError

Convert = Callable[[object], object]
_DIGITS = re.compile(r"[+-]?\d{1,18}")
_TRUE, _FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")


def anything(value: object) -> object:
    return value


def integer(value: object) -> int:
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()) or isinstance(value, float) and value % 1 == 0:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be an integer")
    return value


def auto_or_integer(value: object) -> object:
    return value if value == "auto" else integer(value)


def flag(value: object) -> bool:
    # of a list or a mapping no text is made: aliases can make it larger than any memory
    plain = value if isinstance(value, str | int | float) else ""
    word = str(int(plain) if plain in (0.0, 1.0) else plain).lower()
    if word not in _TRUE + _FALSE:
        raise ValueError("must be a boolean")
    return word in _TRUE


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def names(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a list of names")
    return value


def integers(value: object) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("must be a list of integers")
    return [integer(item) for item in value]


def optional(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def exact(kind: type) -> Convert:
    """Of a key that reaches us as it stands in the yaml."""

    def convert(value: object) -> object:
        if type(value) is not kind:
            raise ValueError(f"must be {_WORDS[kind]}")
        return value

    return convert


def _also(names: str) -> dict[str, Convert]:
    """Keys that no rule reads."""
    return dict.fromkeys(names.split(), anything)


_WORDS = {int: "an integer", bool: "a boolean, true or false without quotes", str: "text"}
_OF_HOST = {int: integer, bool: flag, str: text, tuple[str, ...]: names, tuple[int, ...]: integers}
_MOE = {name: exact(kind) for name, kind in typing.get_type_hints(ChunkMoEConfig).items()}
_MBS = {name: _OF_HOST[kind] for name, kind in typing.get_type_hints(ChunkMBSConfig).items()}
_RECOMPUTE = {
    "apply_modules": names, "use_reentrant": anything, "op_replay_scopes": anything, "flatten_inputs": anything,
}  # fmt: skip

SECTIONS: dict[str, Any] = {
    "parallel": {
        "data_parallel_size": optional(integer),
        "fully_shard_parallel_size": auto_or_integer,
        "fsdp_plan": {
            "apply_modules": names,
            "ignored_modules": names,
            "hook_modules": optional(names),
            **dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"), anything),
            **dict.fromkeys(("reshard_after_forward", "pregather", "cpu_offload"), anything),
            **dict.fromkeys(("num_to_forward_prefetch", "num_to_backward_prefetch"), anything),
        },
        "tensor_parallel_size": integer,
        "tp_plan": anything,
        "ring_attention_size": integer,
        "ulysses_parallel_size": integer,
        "kvallgather_parallel_size": anything,
        "context_parallel_size": anything,  # in stock yamls, and without effect
        "expert_parallel_size": integer,
        "expert_fully_shard_parallel_size": integer,
        "expert_data_parallel_size": anything,
        "ep_plan": {
            "apply_modules": names,
            "apply_efsdp_modules": names,
            "dispatcher": text,
            "use_npu_fused_ops": anything,
            **_MOE,
        },
        "recompute": flag,
        "recompute_plan": _RECOMPUTE,
    },
    "model": {
        "model_name_or_path": optional(text),
        "activation_offload_plan": {"apply_modules": optional(names)},
        **_also("model_id trust_remote_code attn_implementation freeze mtp_num_layers mtp_loss_scaling_factor"),
        **_also("loss_cfg enable_chunk_loss chunkloss_plan"),  # 26.0
    },
    "data": {
        "dataset_param": {
            "basic_parameters": {
                "cutoff_len": optional(integer),
                **_also("cache_dir template chat_template enable_thinking dataset_dir dataset train_on_prompt"),
                **_also("mask_history streaming overwrite_cache preprocessing_batch_size preprocessing_num_workers"),
                **_also("max_samples tool_format val_dataset val_max_samples val_rate packing neat_packing"),
                **_also("preprocess_on_fly async_preprocess async_preprocess_buffer_size stage"),
            },
            **_also("dataset_type preprocess_parameters attr"),
        },
        "dataloader_param": {
            "drop_last": optional(flag),
            **_also("dataloader_mode sampler_type shuffle pin_memory collate_param num_workers enable_preload"),
            **_also("prefetch_factor"),  # in stock yamls
        },
        **_also("val_dataset_param"),
    },
    "features": {
        "recompute": optional(flag),
        "recompute_plan": _RECOMPUTE,
        "loss_cfg": {"loss_type": anything, "router_aux_loss_coef": anything, "router_aux_loss_offload": flag},
        **dict.fromkeys(("enable_chunk_loss", "enable_dynamic_chunk_loss", "chunkloss_plan"), anything),
        **dict.fromkeys(("enable_chunk_layer", "chunk_layer_plan", "chunk_layer"), anything),
        "enable_activation_offload": flag,
        "activation_offload_plan": {"apply_modules": names, "impl": anything},
        "enable_chunk_mbs": flag,
        "chunkmbs_plan": _MBS,
        "enable_ep_balance": flag,
        "ep_balance_plan": anything,
        "skip_moe_pad_tokens": flag,
    },
    "training": {
        "micro_batch_size": integer,
        "val_micro_batch_size": optional(integer),
        "gradient_accumulation_steps": optional(integer),
        "global_batch_size": optional(integer),
        "quantization_plan": {
            "recipe_name": text,
            **_also("apply_modules ignored_modules quant_converters extra_args"),
            **_also("enable_fsdp_low_precision_all_gather fsdp_low_precision_all_gather_mode"),
        },
        "lora": {
            "enable": flag,
            "target_modules": names,
            **_also("rank alpha dropout init_lora_weights pretrained_lora_path lora_target_modules_support"),
            **_also("disable_peft_moe_conversion save_mode"),
        },
        **_also("profile plugin seed train_iters train_epochs max_steps enable_full_determinism use_deter_comp"),
        **_also("lr lr_min lr_start lr_warmup_ratio lr_decay_style lr_decay_ratio lr_scaling_plan weight_decay"),
        **_also("no_decay_modules no_decay_params optimizer adam_fused adam_beta1 adam_beta2 adam_eps"),
        **_also("matched_adamw_rms muon_momentum ns_steps mem_fraction_static clip_grad clip_grad_foreach"),
        **_also("ckpt_manager save save_async save_ckpt_dtype save_format save_interval save_steps"),
        **_also("load load_checkpoint_path load_format load_strict load_rank0_and_broadcast"),
        **_also("no_load_optim no_load_rng no_save_optim no_save_rng log_interval val_interval manual_gc_interval"),
        **_also("init_model_with_meta_device allow_hf32"),
        **_also("validate_interval clip_norm_type max_epochs resume scheduler scheduler_conf"),  # in stock yamls
    },
    "tools": anything,
    "standalone": {"metrics_path": anything},
}

# Where each key of the two features belongs.
HOMES = {
    **{field.name: "parallel.ep_plan" for field in dataclasses.fields(ChunkMoEConfig)},
    **{field.name: "features.chunkmbs_plan" for field in dataclasses.fields(ChunkMBSConfig)},
    "dispatcher": "parallel.ep_plan",
    "hook_modules": "parallel.fsdp_plan",
    "enable_chunk_mbs": "features",
    "chunkmbs_plan": "features",
}
del HOMES["apply_modules"]  # every plan has one
# Sections in which every key of the host is named above, or none is near to another.
SPELT = (
    "", "parallel", "parallel.fsdp_plan", "parallel.ep_plan", "parallel.recompute_plan", "features",
    "features.chunkmbs_plan", "features.recompute_plan", "features.activation_offload_plan", "features.loss_cfg",
    "model.activation_offload_plan", "data", "data.dataset_param.basic_parameters", "data.dataloader_param",
    "training", "training.quantization_plan", "training.lora", "standalone",
)  # fmt: skip
# Sections that models and data sets add keys of their own to: only those that rules read are held to their spelling.
OPEN = ("model", "data.dataset_param")
# Likeness from which one key may be meant for another: more than any two keys of one section that are both in stock
# yamls have; of longer ones it would take too long.
NEAR, _LONG = 0.8, 64


def keys_of(section: str) -> dict[str, object]:
    """The keys of a section by its path; "" for the root."""
    found = SECTIONS
    for segment in filter(None, section.split(".")):
        found = found[segment]
    return found


def spelt(section: str) -> list[str]:
    """The keys that another one of the section may be meant for."""
    return [key for key, convert in keys_of(section).items() if section not in OPEN or convert is not anything]


def nearest(key: str, section: str) -> list[str]:
    """The keys of the section that an unknown one may be meant for: one, or some that are equally near, or none."""
    return [] if key in keys_of(section) else near(key, tuple(spelt(section)))


@functools.lru_cache(maxsize=4096)
def near(word: str, known: tuple[str, ...]) -> list[str]:
    """The known words that may be meant: as of `nearest`."""
    found = {each: _likeness(word, each) for each in known} if len(word) <= _LONG else {}
    best = max(found.values(), default=0.0)
    return [each for each, likeness in found.items() if likeness == best >= NEAR]


def _likeness(word: str, known: str) -> float:
    """difflib's ratio of the keys, or of their words in the order of the alphabet: the order is easily forgotten."""
    both = len(word) + len(known)
    # bounds on either: by the lengths, and by the letters that both have
    if 2 * min(len(word), len(known)) < NEAR * both or 2 * (_letters(word) & _letters(known)).total() < NEAR * both:
        return 0.0
    turned, meant = ("_".join(sorted(each.split("_"))) for each in (word, known))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in ((known, word), (meant, turned)))


@functools.lru_cache(maxsize=4096)
def _letters(word: str) -> collections.Counter[str]:
    return collections.Counter(word)


def unknown(path: str, value: object, section: str, otherwise: str = "correct or remove it") -> ConfigError:
    """The error about a key at the path that the section has not; `otherwise` is the way out where none is near."""
    meant = nearest(path.rpartition(".")[2], section)
    way_out = f"the nearest {'ones are' if meant[1:] else 'one is'} {', '.join(meant)}" if meant else otherwise
    return ConfigError.about(path, value, "unknown key", way_out)


def read(data: object, keys: dict = SECTIONS, path: str = "") -> dict:
    """`data` with the values of `keys` as the host takes them. Raises ConfigError for one of another type."""
    if not isinstance(data, dict):
        raise ConfigError.about(path, data, "must be a mapping", "write its keys below it, indented")
    result = dict(data)
    for name, convert in keys.items():
        if name in data:
            at = f"{path}.{name}" if path else name
            if isinstance(convert, dict):
                result[name] = read(data[name], convert, at)
                continue
            try:
                result[name] = convert(data[name])
            except ValueError as error:
                raise ConfigError.about(at, data[name], str(error), "correct or remove it") from None
    return result
