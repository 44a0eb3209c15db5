"""Keys of the yaml and environment variables: rules and defaults as the code has them, meanings from docstrings."""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from markdown_table import table
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig
from mindspeed_chunk.patches.settings import VARIABLES
from mindspeed_chunk.standalone.config import load_config
from mindspeed_chunk.standalone.section import Section

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "qwen3_5_35b" / "tiny.yaml"
HEAD = ("key", "must be", "default", "meaning")

# Meanings of the keys that the embedded trainer reads itself. Their names are MindSpeed-MM's, except `standalone`.
MEANINGS = {
    "parallel.fully_shard_parallel_size": "FSDP2 shards over all ranks; there is no other data parallelism",
    "parallel.expert_parallel_size": "ranks that share the experts of a layer; divides the ranks and the experts",
    "parallel.fsdp_plan.apply_modules": "FSDP2 units; parameters in none of them belong to the root unit",
    "parallel.fsdp_plan.param_dtype": "dtype of gathered parameters, in which the model computes",
    "parallel.fsdp_plan.reduce_dtype": "dtype in which gradients are summed over ranks",
    "parallel.fsdp_plan.reshard_after_forward": "free gathered parameters after the forward; gather them again later",
    "parallel.fsdp_plan.num_to_forward_prefetch": "number of units that are gathered ahead in the forward",
    "parallel.fsdp_plan.num_to_backward_prefetch": "number of units that are gathered ahead in the backward",
    "parallel.ep_plan.apply_modules": "the modules that contain experts",
    "parallel.ep_plan.dispatcher": "how an MoE layer sends tokens to experts",
    "data.dataset_param.basic_parameters.cutoff_len": "tokens per sample",
    "model.model_id": "the model",
    "model.model_name_or_path": "a folder with its `config.json`; if the folder also has weights, they are loaded",
    "model.attn_implementation": "transformers' name of the attention",
    "features.recompute": "recompute the blocks of `recompute_plan`",
    "features.recompute_plan.apply_modules": "the blocks that are recomputed",
    "features.enable_activation_offload": "offload activations of the blocks of `activation_offload_plan`",
    "features.activation_offload_plan.apply_modules": "the blocks whose activations are kept on the host",
    "features.enable_chunk_mbs": "turn on ChunkMBS with the settings of `chunkmbs_plan`",
    "features.loss_cfg.router_aux_loss_coef": "weight of the routers' balance loss; 0: it is not computed",
    "training.optimizer": "torch's AdamW",
    "training.micro_batch_size": "samples per pass and rank",
    "training.gradient_accumulation_steps": "passes per optimizer step",
    "training.seed": "seed of the weights and of the order of samples",
    "training.lr": "learning rate, constant",
    "training.weight_decay": "weight decay of AdamW",
    "training.adam_beta1": "beta1 of AdamW",
    "training.adam_beta2": "beta2 of AdamW",
    "training.adam_eps": "eps of AdamW",
    "training.clip_grad": "largest total norm of the gradients; 0: no clipping",
    "training.train_iters": "number of optimizer steps",
    "training.log_interval": "steps between two log lines",
    "standalone.metrics_path": "a file to which rank 0 writes one JSON line per step",
}


class _Ranks(int):
    """A number whose text is its meaning."""

    def __str__(self) -> str:
        return "the number of ranks"


def chunk_moe() -> str:
    return _fields(ChunkMoEConfig)


def chunk_mbs() -> str:
    return _fields(ChunkMBSConfig)


def trainer() -> str:
    """Every key that the trainer reads in the example."""
    rows = []
    for path, rule, default in trainer_keys():
        if path not in MEANINGS:
            raise SystemExit(f"{path}: the trainer reads it: add its meaning to MEANINGS in {__file__}")
        rows.append((f"`{path}`", rule, default, MEANINGS[path]))
    return table(HEAD, rows)


def trainer_keys() -> list[tuple[str, str, str]]:
    """Path, rule and default of each key."""
    asked, read = {}, Section.read

    def recording(section, name, convert, default=dataclasses.MISSING):
        asked[section.at(name)] = (_rule_of(convert), _shown(default))
        return read(section, name, convert, default)

    with mock.patch.object(Section, "read", recording):
        load_config(EXAMPLE, ["standalone.metrics_path=null"], _Ranks(2))
    return sorted((path, *rest) for path, rest in asked.items())


def switches() -> str:
    return table(("variable", "effect"), ((f"`{name}={value}`", effect) for name, (value, effect) in VARIABLES.items()))


def meanings(cls: type) -> dict[str, str]:
    """The text for each field in the docstring of a configuration: `name, name: text`, continued by indented lines."""
    found = {}
    pattern = r"^(\w+(?:, \w+)*): (.+(?:\n {4}.+)*)"
    for names, text in re.findall(pattern, inspect.getdoc(cls) or "", re.M):
        found.update(dict.fromkeys(names.split(", "), " ".join(text.split()).removesuffix(".")))
    return found


def _fields(cls: type) -> str:
    said = meanings(cls)
    rows = []
    for field in dataclasses.fields(cls):
        rule = field.metadata["rule"].words.removeprefix("must be ")
        rows.append((f"`{field.name}`", rule, _shown(field.default), said[field.name]))
    return table(HEAD, rows)


def _rule_of(convert: Callable[[object], object]) -> str:
    """Its rule, from the error for a wrong value."""
    try:
        convert(object())
    except ValueError as error:
        return str(error).removeprefix("must be ")
    raise AssertionError(f"{convert} accepts any value")


def _shown(default: object) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if default is None:
        return "not set"
    return f"`{default if default and isinstance(default, str) else json.dumps(default)}`"
