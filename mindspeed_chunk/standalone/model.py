"""Builds transformers' Qwen3.5-MoE, finds modules by MindSpeed-MM's patterns, and gives the experts a dispatcher."""

import copy
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.mbs.block import check_order
from mindspeed_chunk.model_config import BadConfig
from mindspeed_chunk.model_config import read as read_config
from mindspeed_chunk.moe.alltoall import AllToAllDispatcher
from mindspeed_chunk.moe.arguments import order_routing
from mindspeed_chunk.moe.checks import check_experts
from mindspeed_chunk.moe.dispatcher import ChunkMoEDispatcher, Dispatcher
from mindspeed_chunk.names import read_patterns
from mindspeed_chunk.observe import emit
from mindspeed_chunk.standalone.config import Config
from mindspeed_chunk.wording import shown

try:
    import transformers
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter, load_balancing_loss_func
except ImportError as error:
    rule, way_out = "the trainer needs transformers 5 to build its model", "pip install 'mindspeed_chunk[standalone]'"
    raise ConfigError.about("transformers", str(error), rule, way_out) from None

MODEL_TYPE = "qwen3_5_moe"


def read_model_config(config: Config, vocabulary: int) -> Qwen3_5MoeConfig:
    """The Qwen3_5MoeConfig in the model folder, checked with `config` and the vocabulary size of the data.

    Raises ConfigError.
    """
    folder = Path(config.model.model_name_or_path)
    try:
        content = read_config(folder)
    except BadConfig as error:
        raise _model_error(folder, str(error)) from None
    model_type = content.get("model_type")
    try:
        model_config = Qwen3_5MoeConfig.from_dict(content)
    except Exception as error:  # transformers' checks raise many kinds
        raise _model_error(folder, f"its config.json is not valid: {' '.join(str(error).split())}") from None
    text: Any = model_config.text_config
    if model_type != MODEL_TYPE:
        raise _model_error(
            folder, f"its model_type is {shown(model_type)}, but this trainer supports only {MODEL_TYPE!r}"
        )
    check_experts(config.ep_size, text.num_experts)
    if text.hidden_act != "silu":
        raise _model_error(
            folder, f"its hidden_act is {shown(text.hidden_act)}, but the dispatchers compute SwiGLU (silu)"
        )
    if text.vocab_size < vocabulary:
        raise _model_error(folder, f"its vocab_size is {text.vocab_size}, but the data has {vocabulary} tokens")
    return model_config


def _model_error(folder: Path, rule: str) -> ConfigError:
    way_out = "give the folder of a Qwen3.5-MoE config or checkpoint"
    return ConfigError.about("model.model_name_or_path", str(folder), rule, way_out)


def build_model(config: Config, model_config: Qwen3_5MoeConfig) -> torch.nn.Module:
    """Qwen3_5MoeForConditionalGeneration in fp32: seeded random weights, or those in the folder; equal on all ranks.

    The input is text only, so the vision tower never runs; it is frozen.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its notes on kernels that only accelerators have
    folder = Path(config.model.model_name_or_path)
    _check_memory(folder, model_config)
    if any(folder.glob("*.safetensors")):
        transformers.utils.logging.disable_progress_bar()
        model = Qwen3_5MoeForConditionalGeneration.from_pretrained(
            folder, config=model_config, dtype=torch.float32, attn_implementation=config.model.attn_implementation
        )
    else:
        torch.manual_seed(config.training.seed)
        model = Qwen3_5MoeForConditionalGeneration._from_config(
            model_config, dtype=torch.float32, attn_implementation=config.model.attn_implementation
        )
    model.model.visual.requires_grad_(False)
    return model.train()


def _check_memory(folder: Path, model_config: Qwen3_5MoeConfig) -> None:
    """Raises ConfigError if the model cannot be built, or if its fp32 weights do not fit into this machine's memory."""
    try:
        with torch.device("meta"):
            # a copy, because a model changes its config
            model = Qwen3_5MoeForConditionalGeneration(copy.deepcopy(model_config))
        needed = sum(parameter.numel() for parameter in model.parameters()) * torch.float32.itemsize
    except Exception as error:  # inconsistent sizes raise many kinds of errors
        raise _model_error(folder, f"its model cannot be built: {' '.join(str(error).split())}") from None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        rule = f"its weights are {needed / 2**30:.3g} GiB in fp32, but this machine has {memory / 2**30:.3g} GiB"
        raise _model_error(folder, rule)


def match_modules(model: torch.nn.Module, patterns: Sequence[str], path: str) -> dict[str, torch.nn.Module]:
    """Modules by name, in the model's order, whose whole name matches one of `patterns`.

    Raises ConfigError for a pattern that matches nothing.
    """
    names = set()
    for pattern in read_patterns(patterns, path):
        matched = {name for name, _ in model.named_modules() if pattern.matches(name)}
        if not matched:
            raise ConfigError.about(path, pattern.text, "matches no module of the model", "correct it or remove it")
        names |= matched
    return {name: module for name, module in model.named_modules() if name in names}


@dataclass(frozen=True)
class Modules:
    """The model's modules that the yaml's `apply_modules` lists name."""

    fsdp: list[torch.nn.Module]
    experts: list[torch.nn.Module]
    recompute: dict[str, torch.nn.Module]
    offload: dict[str, torch.nn.Module]
    chunk: dict[str, torch.nn.Module]


def find_modules(model: torch.nn.Module, config: Config) -> Modules:
    """Raises ConfigError for a pattern without a match, for experts that are not, or if ChunkMBS cannot work."""
    ep_path = "parallel.ep_plan.apply_modules"
    experts = match_modules(model, config.ep.apply_modules, ep_path)
    for name, module in experts.items():
        if not {"gate_up_proj", "down_proj"} <= dict(module.named_parameters(recurse=False)).keys():
            raise ConfigError.about(ep_path, name, "has no gate_up_proj and down_proj", "name the experts' modules")
    fsdp = match_modules(model, config.fsdp.apply_modules, "parallel.fsdp_plan.apply_modules")
    modules = Modules(
        fsdp=list(fsdp.values()),
        experts=list(experts.values()),
        recompute=match_modules(model, config.recompute_modules, "features.recompute_plan.apply_modules"),
        offload=match_modules(model, config.offload_modules, "features.activation_offload_plan.apply_modules"),
        chunk=match_modules(
            model, config.chunk_mbs.apply_modules if config.chunk_mbs else (), "features.chunkmbs_plan.apply_modules"
        ),
    )
    check_order(modules.recompute, modules.offload, modules.chunk)
    return modules


def use_dispatcher(experts: Iterable[torch.nn.Module], config: Config, ep_group: dist.ProcessGroup | None) -> None:
    """Replace the experts' forward by a call of the configured dispatcher."""
    for module in experts:
        dispatcher: Dispatcher
        if config.ep.dispatcher == "chunkmoe":
            dispatcher = ChunkMoEDispatcher(config.chunk_moe, weight_layout="LFH")
        else:
            dispatcher = AllToAllDispatcher(weight_layout="LFH")
        module.forward = partial(_dispatch, module, dispatcher, ep_group)


def _dispatch(
    experts: Any, dispatcher: Dispatcher, ep_group: Any, hidden_states: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """experts(rows [T, H], index [T, K], weights [T, K]) -> [T, H], index and weights in either order."""
    index, weights = order_routing(first, second)
    emit("layer", "begin")
    try:
        return dispatcher(
            experts.num_experts,
            weights,
            index,
            hidden_states,
            experts.gate_up_proj,
            experts.down_proj,
            ep_group=ep_group,
        )
    finally:
        emit("layer", "end")


class BalanceLoss:
    """The routers' auxiliary load-balancing loss over one forward, as transformers defines it.

    transformers' own capture of router logits uses the name of the model's class, which FSDP2 changes. And a recompute
    runs the routers once more, so logits are recorded only between `start` and `finish`.
    """

    def __init__(self, model: Any) -> None:
        self._text_config = model.config.text_config
        self._logits: Any = None
        for module in model.modules():
            if isinstance(module, Qwen3_5MoeTopKRouter):
                module.register_forward_hook(self._keep)

    def _keep(self, router: torch.nn.Module, args: object, output: Any) -> None:
        if self._logits is not None:
            self._logits.append(output[0])

    def recorded(self) -> list[list[Tensor]]:
        """The list to which logits are now recorded, which ChunkMBS puts in order."""
        return [] if self._logits is None else [self._logits]

    def start(self) -> None:
        self._logits = []

    def finish(self) -> Any:
        logits, self._logits = tuple(self._logits), None
        return load_balancing_loss_func(logits, self._text_config.num_experts, self._text_config.num_experts_per_tok)
