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

# Of the keys that the embedded trainer reads itself; their names are MindSpeed-MM's, but for `standalone`.
MEANINGS = {
    "parallel.fully_shard_parallel_size": "FSDP2 shards over all ranks; there is no other data parallelism",
    "parallel.expert_parallel_size": "ranks that share the experts of a layer; divides the ranks and the experts",
    "parallel.fsdp_plan.apply_modules": "FSDP2 units; what is in none of them belongs to the root's",
    "parallel.fsdp_plan.param_dtype": "of gathered parameters, in which the model computes",
    "parallel.fsdp_plan.reduce_dtype": "in which gradients are summed over ranks",
    "parallel.fsdp_plan.reshard_after_forward": "gathered parameters are freed after the forward, and gathered again",
    "parallel.fsdp_plan.num_to_forward_prefetch": "units gathered ahead in the forward",
    "parallel.fsdp_plan.num_to_backward_prefetch": "units gathered ahead in the backward",
    "parallel.ep_plan.apply_modules": "the modules that hold experts",
    "parallel.ep_plan.dispatcher": "the road of an MoE layer",
    "data.dataset_param.basic_parameters.cutoff_len": "tokens a sample",
    "model.model_id": "the model",
    "model.model_name_or_path": "a folder with its `config.json`; with weights beside it, these are loaded",
    "model.attn_implementation": "transformers' name of the attention",
    "features.recompute": "recompute the blocks of `recompute_plan`",
    "features.recompute_plan.apply_modules": "the blocks that are recomputed",
    "features.enable_activation_offload": "offload activations of the blocks of `activation_offload_plan`",
    "features.activation_offload_plan.apply_modules": "the blocks whose activations wait on the host",
    "features.enable_chunk_mbs": "ChunkMBS, as `chunkmbs_plan` says",
    "features.loss_cfg.router_aux_loss_coef": "weight of the routers' balance loss; with 0 it is not computed",
    "training.optimizer": "torch's AdamW",
    "training.micro_batch_size": "samples a pass and rank",
    "training.gradient_accumulation_steps": "passes an optimizer step",
    "training.seed": "of the weights and of the order of samples",
    "training.lr": "learning rate, constant",
    "training.weight_decay": "of AdamW",
    "training.adam_beta1": "of AdamW",
    "training.adam_beta2": "of AdamW",
    "training.adam_eps": "of AdamW",
    "training.clip_grad": "largest norm of all gradients together; with 0 they are not clipped",
    "training.train_iters": "optimizer steps",
    "training.log_interval": "steps between two log lines",
    "standalone.metrics_path": "a file that rank 0 writes one JSON line a step to",
}


class _Ranks(int):
    """A number of ranks whose text is what it stands for."""

    def __str__(self) -> str:
        return "the number of ranks"


def chunk_moe() -> str:
    return _fields(ChunkMoEConfig)


def chunk_mbs() -> str:
    return _fields(ChunkMBSConfig)


def trainer() -> str:
    """Every key that the trainer asks for while it reads the example."""
    rows = []
    for path, rule, default in trainer_keys():
        if path not in MEANINGS:
            raise SystemExit(f"{path}: the trainer reads it: add its meaning to MEANINGS in {__file__}")
        rows.append((f"`{path}`", rule, default, MEANINGS[path]))
    return table(HEAD, rows)


def trainer_keys() -> list[tuple[str, str, str]]:
    """Path, rule and default of each."""
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
    """What the docstring of a configuration says of each field: `name, name: text`, continued by indented lines."""
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
    """What it says of a value that is none."""
    try:
        convert(object())
    except ValueError as error:
        return str(error).removeprefix("must be ")
    raise AssertionError(f"{convert} takes anything")


def _shown(default: object) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if default is None:
        return "not set"
    return f"`{default if default and isinstance(default, str) else json.dumps(default)}`"
