"""One table of the yaml's keys, for the settings, lint, the embedded trainer and the documents.

A key that is not here is ignored: every section of the host accepts extra keys. The embedded trainer is strict. Lint
is as lenient as the host's pydantic ("2" is 2), but true is not a number. The host passes the keys of Chunk MoE on as
they are, so lint is as strict with them as `ChunkMoEConfig`.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.values import (
    AUTO_OR_COUNT,
    COUNT,
    DTYPE,
    FLAG,
    MAPPING,
    NAMES,
    TEXT,
    ValueRule,
    choice,
    integer,
    number,
)

# "eager" and "fused" are those of MindSpeed-MM 26.0
DISPATCHERS = ("alltoall", "allgather", "mc2", "chunkmoe", "eager", "fused")
REQUIRED = dataclasses.MISSING
_EP_SIZE = integer(1, "write 1 for no expert parallelism")


class Key(NamedTuple):
    """What the package knows about a key; only the name, if no reader uses the key.

    lint: the rule for lint. null: whether the host accepts null, too.
    trainer: the rule for the embedded trainer, which uses the default if the key is missing or null.
    meaning: its effect in the embedded trainer, for docs/config.md.
    setting: whether it is a field of `ChunkMoEConfig` or `ChunkMBSConfig`, with its default and meaning there.
    """

    lint: ValueRule | None = None
    trainer: ValueRule | None = None
    default: Any = None
    meaning: str = ""
    null: bool = False
    setting: bool = False


def lint(rule: ValueRule, null: bool = False) -> Key:
    return Key(rule, null=null)


def trainer(rule: ValueRule, default: Any, meaning: str) -> Key:
    return Key(None, rule, default, meaning)


def both(rule: ValueRule, default: Any, meaning: str, null: bool = False) -> Key:
    return Key(rule, rule, default, meaning, null)


def others(names: str) -> dict[str, Key]:
    """Keys that no reader uses; a misspelt key is compared with their names, too."""
    return dict.fromkeys(names.split(), Key())


def _settings(cls: type, strict: bool) -> dict[str, Key]:
    """The fields of a class of settings. `strict`: the host passes their values on as they are."""
    rules: dict[str, ValueRule] = {field.name: field.metadata["rule"] for field in dataclasses.fields(cls)}
    return {name: Key(rule.strict() if strict else rule, setting=True) for name, rule in rules.items()}


_DISPATCHER = Key(
    lint=choice(*DISPATCHERS),
    trainer=choice("alltoall", "chunkmoe"),
    default="alltoall",
    meaning="how an MoE layer sends tokens to experts",
)
_RECOMPUTE = {"apply_modules": lint(NAMES), **others("use_reentrant op_replay_scopes flatten_inputs")}

SECTIONS: dict[str, Any] = {
    "parallel": {
        "data_parallel_size": lint(COUNT, null=True),
        "fully_shard_parallel_size": both(AUTO_OR_COUNT, "auto", "auto or the number of ranks; FSDP2 uses all of them"),
        "fsdp_plan": {
            "apply_modules": both(NAMES, (), "FSDP2 units; parameters in none of them belong to the root unit"),
            "ignored_modules": lint(NAMES),
            "hook_modules": lint(NAMES, null=True),
            "param_dtype": trainer(DTYPE, "float32", "dtype of gathered parameters, in which the model computes"),
            "reduce_dtype": trainer(DTYPE, "float32", "dtype in which gradients are summed over ranks"),
            "reshard_after_forward": trainer(FLAG, True, "free gathered parameters between forward and backward"),
            "num_to_forward_prefetch": trainer(integer(0), 0, "units that are gathered ahead in the forward"),
            "num_to_backward_prefetch": trainer(integer(0), 0, "units that are gathered ahead in the backward"),
            **others("output_dtype cast_forward_inputs pregather cpu_offload"),
        },
        "tensor_parallel_size": lint(COUNT),
        "ring_attention_size": lint(COUNT),
        "ulysses_parallel_size": lint(COUNT),
        "expert_parallel_size": both(
            _EP_SIZE, 1, "ranks that share the experts of a layer; divides the ranks and the experts"
        ),
        "expert_fully_shard_parallel_size": lint(COUNT),
        **others("tp_plan kvallgather_parallel_size expert_data_parallel_size"),
        **others("context_parallel_size"),  # in stock yamls, without effect
        "ep_plan": {
            "apply_modules": both(NAMES, (), "the modules that contain experts"),
            "apply_efsdp_modules": lint(NAMES),
            "dispatcher": _DISPATCHER,
            **others("use_npu_fused_ops"),
            **_settings(ChunkMoEConfig, strict=True),
        },
        "recompute": lint(FLAG),
        "recompute_plan": _RECOMPUTE,
    },
    "model": {
        "model_id": Key(TEXT, choice("qwen3_5_moe"), "qwen3_5_moe", "the model", null=True),
        "model_name_or_path": both(
            TEXT, REQUIRED, "a folder with its `config.json`; weights in it are loaded", null=True
        ),
        "attn_implementation": Key(
            TEXT, choice("sdpa", "eager"), "sdpa", "transformers' name of the attention", null=True
        ),
        "activation_offload_plan": {"apply_modules": lint(NAMES, null=True)},
        **others("trust_remote_code freeze mtp_num_layers mtp_loss_scaling_factor"),
        **others("gdn_implementation causal_conv1d_implementation kda_implementation use_experts_implementation"),
        **others("loss_cfg enable_chunk_loss chunkloss_plan"),  # 26.0
    },
    "data": {
        "dataset_param": {
            "basic_parameters": {
                "cutoff_len": both(integer(2), REQUIRED, "tokens per sample", null=True),
                **others("cache_dir template chat_template enable_thinking dataset_dir dataset train_on_prompt"),
                **others("mask_history streaming overwrite_cache preprocessing_batch_size preprocessing_num_workers"),
                **others("max_samples tool_format val_dataset val_max_samples val_rate packing neat_packing"),
                **others("preprocess_on_fly async_preprocess async_preprocess_buffer_size stage"),
            },
            **others("dataset_type preprocess_parameters attr"),
        },
        "dataloader_param": {
            "drop_last": lint(FLAG, null=True),
            **others("dataloader_mode sampler_type shuffle pin_memory collate_param num_workers enable_preload"),
            **others("prefetch_factor"),  # in stock yamls
        },
        **others("val_dataset_param"),
    },
    "features": {
        "recompute": both(FLAG, False, "recompute the blocks of `recompute_plan`", null=True),
        "recompute_plan": {**_RECOMPUTE, "apply_modules": both(NAMES, (), "the blocks that are recomputed")},
        "loss_cfg": {
            "router_aux_loss_coef": trainer(number(0.0), 0.0, "weight of the routers' balance loss; 0: not computed"),
            "router_aux_loss_offload": lint(FLAG),
            **others("loss_type"),
        },
        "enable_activation_offload": both(
            FLAG, False, "offload activations of the blocks of `activation_offload_plan`"
        ),
        "activation_offload_plan": {
            "apply_modules": both(NAMES, (), "the blocks whose activations are kept on the host"),
            **others("impl"),
        },
        "enable_chunk_mbs": both(FLAG, False, "turn on ChunkMBS with the settings of `chunkmbs_plan`"),
        "chunkmbs_plan": _settings(ChunkMBSConfig, strict=False),
        "enable_ep_balance": lint(FLAG),
        "skip_moe_pad_tokens": lint(FLAG),
        **others("enable_chunk_loss enable_dynamic_chunk_loss chunkloss_plan"),
        **others("enable_chunk_layer chunk_layer_plan chunk_layer ep_balance_plan"),
    },
    "training": {
        "optimizer": trainer(choice("adamw"), "adamw", "torch's AdamW"),
        "micro_batch_size": both(COUNT, 1, "samples per pass and rank"),
        "val_micro_batch_size": lint(COUNT, null=True),
        "gradient_accumulation_steps": both(COUNT, 1, "passes per optimizer step", null=True),
        "global_batch_size": lint(COUNT, null=True),
        "seed": trainer(integer(0), 42, "seed of the weights and of the order of samples"),
        "lr": trainer(number(0.0), 5e-5, "learning rate, constant"),
        "weight_decay": trainer(number(0.0), 0.0, "weight decay of AdamW"),
        "adam_beta1": trainer(number(0.0, below=1.0), 0.9, "beta1 of AdamW"),
        "adam_beta2": trainer(number(0.0, below=1.0), 0.999, "beta2 of AdamW"),
        "adam_eps": trainer(number(0.0), 1e-8, "eps of AdamW"),
        "clip_grad": trainer(number(0.0), 1.0, "largest total norm of the gradients; 0: no clipping"),
        "train_iters": trainer(COUNT, 10000, "number of optimizer steps"),
        "log_interval": trainer(COUNT, 1, "steps between two log lines"),
        "quantization_plan": {
            "recipe_name": lint(TEXT),
            **others("apply_modules ignored_modules quant_converters extra_args"),
            **others("enable_fsdp_low_precision_all_gather fsdp_low_precision_all_gather_mode"),
        },
        "lora": {
            "enable": lint(FLAG),
            "target_modules": lint(NAMES),
            **others("rank alpha dropout init_lora_weights pretrained_lora_path lora_target_modules_support"),
            **others("disable_peft_moe_conversion save_mode"),
        },
        **others("profile plugin train_epochs max_steps enable_full_determinism use_deter_comp"),
        **others("lr_min lr_start lr_warmup_ratio lr_decay_style lr_decay_ratio lr_scaling_plan"),
        **others("no_decay_modules no_decay_params adam_fused matched_adamw_rms muon_momentum ns_steps"),
        **others("mem_fraction_static clip_grad_foreach ckpt_manager save save_async save_ckpt_dtype save_format"),
        **others("save_interval save_steps load load_checkpoint_path load_format load_strict load_rank0_and_broadcast"),
        **others("no_load_optim no_load_rng no_save_optim no_save_rng val_interval manual_gc_interval"),
        **others("init_model_with_meta_device allow_hf32"),
        **others("validate_interval clip_norm_type max_epochs resume scheduler scheduler_conf"),  # in stock yamls
    },
    **others("tools"),
    "standalone": {
        "metrics_path": trainer(TEXT, None, "a file to which rank 0 writes one JSON line per step"),
    },
}

# Models and data sets add their own keys to these sections: only keys for lint and sections are suggested here.
_OPEN = ("model", "data.dataset_param")
# Keys with at least this likeness may be meant for each other: more than any two keys of one section in stock yamls
# have. For longer keys it would take too long.
NEAR, _LONG = 0.8, 64


def joined(section: str, key: object) -> str:
    return f"{section}.{key}" if section else str(key)


def at(path: str) -> Any:
    """The Key at a path, or the keys of a section; "" is the root."""
    return functools.reduce(lambda section, segment: section[segment], filter(None, path.split(".")), SECTIONS)


def _paths(keys: dict[str, Any], path: str = "") -> Iterator[str]:
    yield path
    for name, key in keys.items():
        if isinstance(key, dict):
            yield from _paths(key, joined(path, name))


PATHS = tuple(_paths(SECTIONS))  # of all sections
# The section of each key of the two features.
HOMES = {
    **{name: path for path in PATHS for name, key in at(path).items() if isinstance(key, Key) and key.setting},
    "dispatcher": "parallel.ep_plan",
    "hook_modules": "parallel.fsdp_plan",
    "enable_chunk_mbs": "features",
    "chunkmbs_plan": "features",
}
del HOMES["apply_modules"]  # every plan has one


def nearest(key: str, section: str) -> list[str]:
    """The keys of the section that an unknown key may mean: one, several that are equally near, or none."""
    known = at(section)
    meant = (name for name, each in known.items() if section not in _OPEN or isinstance(each, dict) or each.lint)
    return [] if key in known else near(key, tuple(meant))


@functools.lru_cache(maxsize=4096)
def near(word: str, known: tuple[str, ...]) -> list[str]:
    """The known words that a word may mean: one, several that are equally near, or none."""
    likeness_of = {each: _likeness(word, each) for each in known} if len(word) <= _LONG else {}
    best = max(likeness_of.values(), default=0.0)
    return [each for each, likeness in likeness_of.items() if likeness == best >= NEAR]


def _likeness(word: str, known: str) -> float:
    """difflib's ratio of the keys, or of their words in alphabetical order: users often forget the order."""
    both = len(word) + len(known)
    # upper bounds of both ratios: by the lengths, and by the letters that both keys have
    if 2 * min(len(word), len(known)) < NEAR * both or 2 * (_letters(word) & _letters(known)).total() < NEAR * both:
        return 0.0
    turned, meant = ("_".join(sorted(each.split("_"))) for each in (word, known))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in ((known, word), (meant, turned)))


@functools.lru_cache(maxsize=4096)
def _letters(word: str) -> collections.Counter[str]:
    return collections.Counter(word)


def unknown(path: str, value: object, section: str, otherwise: str = "correct or remove it") -> ConfigError:
    """The error about a key that the section does not have; `otherwise` is the way out if no known key is near."""
    meant = nearest(path.rpartition(".")[2], section)
    way_out = f"the nearest {'ones are' if meant[1:] else 'one is'} {', '.join(meant)}" if meant else otherwise
    return ConfigError.about(path, value, "unknown key", way_out)


def read(data: object, keys: dict[str, Any] = SECTIONS, path: str = "") -> dict[str, Any]:
    """`data` with the values of `keys` as the host reads them. Raises ConfigError for a value of a wrong type."""
    result = dict(MAPPING.take(path, data))
    for name, key in keys.items():
        if name in result:
            value, at = result[name], joined(path, name)
            if isinstance(key, dict):
                result[name] = read(value, key, at)
            elif key.lint and not (key.null and value is None):
                result[name] = key.lint.take_type(at, value)
    return result


def check(path: str, value: object) -> None:
    """Raises ConfigError if the value breaks the rule for lint of the key at the path."""
    at(path).lint.take(path, value)
