"""Sizes of a Qwen3.5-MoE from its transformers config: every parameter with its name and shape. Needs no torch.

Names and shapes are those of `Qwen3_5MoeForConditionalGeneration`. The multi-token prediction head of the published
checkpoints is no part of that class, nor of these sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.model_config import MAX_LAYERS, BadConfig, read_file
from mindspeed_chunk.wording import one_line

MODEL_TYPE = "qwen3_5_moe"
_HUB = "https://huggingface.co/Qwen"
_LINEAR, _FULL = "linear_attention", "full_attention"
_LAYERS, _MAX_SIZE = ("num_hidden_layers", "depth"), 10**9
# one layer in this many has full attention, if a config does not list the layers
_FULL_ATTENTION_INTERVAL = 4


class Parameter(NamedTuple):
    """One parameter by its name in the model; `expert` for those that an expert-parallel rank has a part of."""

    name: str
    shape: tuple[int, ...]
    expert: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class VisionSize:
    """`vision_config`, with transformers' defaults."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 2304
    out_hidden_size: int = 3584


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a Qwen3.5-MoE: `text_config`, with transformers' names and defaults, and what belongs to it.

    Attributes:
        name: as the user gave it.
        source: where the sizes were read.
        vision: sizes of the vision tower.
        layer_types: "linear_attention" or "full_attention" for each layer.
    """

    name: str
    source: str
    vision: VisionSize
    vocab_size: int = 248320
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 256
    num_experts_per_tok: int = 8
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] = ()

    @property
    def linear_key_width(self) -> int:
        """Columns of all keys of a linear-attention layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_width(self) -> int:
        """Columns of all values of a linear-attention layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def num_full_attention(self) -> int:
        """Layers with full attention."""
        return self.layer_types.count(_FULL)

    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters, in the model's own order of modules."""
        return _all_parameters(self)

    def num_parameters(self) -> int:
        """All elements, the vision tower's among them."""
        return sum(parameter.numel for parameter in self.parameters())

    def num_active(self) -> int:
        """Parameters that one text token uses: all of the language model except experts to which it is not routed."""
        text = [parameter for parameter in self.parameters() if not parameter.name.startswith("model.visual.")]
        experts = sum(parameter.numel for parameter in text if parameter.expert)
        others = sum(parameter.numel for parameter in text if not parameter.expert)
        return others + experts * self.num_experts_per_tok // self.num_experts


# Sizes of the models' own config.json on the Hugging Face hub, where they differ from transformers' defaults.
BUILT_IN: dict[str, dict[str, Any]] = {
    "qwen3.5-35b-a3b": {"vision_config": {"out_hidden_size": 2048}},
    "qwen3.5-122b-a10b": {
        "text_config": {
            "hidden_size": 3072,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "linear_num_value_heads": 64,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
        "vision_config": {"out_hidden_size": 3072},
    },
    "qwen3.5-397b-a17b": {
        "text_config": {
            "hidden_size": 4096,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "linear_num_value_heads": 64,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
        "vision_config": {"out_hidden_size": 4096},
    },
}


def load_model(name: str) -> ModelSize:
    """The sizes of a built-in model, whose name may be short ("35b"), or of the config.json in a folder.

    Raises:
        ConfigError: naming the models there are.
    """
    folder = Path(name)
    if os.path.isdir(folder) or folder.suffix == ".json":  # not Path's, which raises for a name that is too long
        return _from_folder(name, folder)
    wanted = name.lower().removeprefix("qwen/")
    matches = [full for full in BUILT_IN if wanted == full or (len(wanted) > 1 and wanted in full.split("-"))]
    if len(matches) != 1:
        rule = f"no folder with a config.json, and no built-in model ({', '.join(BUILT_IN)})"
        raise ConfigError.about("--model", name, rule, "give one of the two")
    content = {"model_type": MODEL_TYPE, **BUILT_IN[matches[0]]}
    return from_config(content, matches[0], f"{_HUB}/{matches[0].upper().replace('QWEN', 'Qwen')}")


def _from_folder(name: str, path: Path) -> ModelSize:
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        content = read_file(file)
    except BadConfig as error:
        raise ConfigError.about("--model", name, str(error), "give the folder of a Qwen3.5-MoE") from None
    return from_config(content, name, str(file))


def from_config(content: Mapping[str, Any], name: str, source: str) -> ModelSize:
    """The sizes in the content of a config.json.

    Raises:
        ConfigError: for another kind of model, or a size that is no positive integer.
    """
    if content.get("model_type") != MODEL_TYPE:
        raise _wrong(name, "model_type", content.get("model_type"), f"must be {MODEL_TYPE!r}, the one that is known")
    text = {"tie_word_embeddings": False, **content, **_section(content, "text_config", name)}
    if not isinstance(text["tie_word_embeddings"], bool):
        raise _wrong(name, "tie_word_embeddings", text["tie_word_embeddings"], "must be true or false")
    size = ModelSize(
        name=one_line(name),
        source=one_line(source),
        vision=VisionSize(**_sizes(VisionSize, _section(content, "vision_config", name), name, "vision_config")),
        **_sizes(ModelSize, text, name, "text_config"),
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    if size.num_experts_per_tok > size.num_experts:
        rule = f"must be at most num_experts, {size.num_experts}"
        raise _wrong(name, "text_config.num_experts_per_tok", size.num_experts_per_tok, rule)
    return dataclasses.replace(size, layer_types=_layer_types(text, size.num_hidden_layers, name))


def _section(content: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """Empty if it is missing or null, as for transformers."""
    section = content.get(key)
    if not isinstance(section, Mapping | None):
        raise _wrong(name, key, section, "must be a mapping")
    return section or {}


def _layer_types(text: Mapping[str, Any], number: int, name: str) -> tuple[str, ...]:
    layers = text.get("layer_types")
    if layers is None:
        interval = text.get("full_attention_interval", _FULL_ATTENTION_INTERVAL)
        _check_size(interval, MAX_LAYERS, name, "text_config.full_attention_interval")
        return tuple(_LINEAR if (n + 1) % interval else _FULL for n in range(number))
    if not isinstance(layers, list) or len(layers) != number or any(kind not in (_LINEAR, _FULL) for kind in layers):
        rule = f"must be a list of {number} (num_hidden_layers), each {_LINEAR} or {_FULL}"
        raise _wrong(name, "text_config.layer_types", layers, rule)
    return tuple(layers)


def _sizes(cls: type, content: Mapping[str, Any], name: str, section: str) -> dict[str, Any]:
    keys = [field.name for field in dataclasses.fields(cls) if field.type == "int" and field.name in content]
    for key in keys:
        _check_size(content[key], MAX_LAYERS if key in _LAYERS else _MAX_SIZE, name, f"{section}.{key}")
    return {key: content[key] for key in keys}


def _check_size(value: Any, largest: int, name: str, key: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise _wrong(name, key, value, f"must be an integer of at least 1 and at most {largest}")


def _wrong(name: str, key: str, value: object, rule: str) -> ConfigError:
    return ConfigError.about(f"--model {name}: {key}", value, rule, "correct its config.json, or give another model")


@functools.lru_cache(maxsize=16)
def _all_parameters(size: ModelSize) -> tuple[Parameter, ...]:
    return tuple(_parameters(size))


def _parameters(size: ModelSize) -> Iterator[Parameter]:
    for name, shape in _vision(size.vision):
        yield Parameter(f"model.visual.{name}", shape, False)
    language = "model.language_model"
    yield Parameter(f"{language}.embed_tokens.weight", (size.vocab_size, size.hidden_size), False)
    for number, kind in enumerate(size.layer_types):
        attention = _linear_attention(size) if kind == _LINEAR else _full_attention(size)
        for name, shape in (*attention, *_mlp(size)):
            yield Parameter(f"{language}.layers.{number}.{name}", shape, name.startswith("mlp.experts."))
    yield Parameter(f"{language}.norm.weight", (size.hidden_size,), False)
    if not size.tie_word_embeddings:
        yield Parameter("lm_head.weight", (size.vocab_size, size.hidden_size), False)


_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def _linear_attention(size: ModelSize) -> _Shapes:
    hidden, heads, value = size.hidden_size, size.linear_num_value_heads, size.linear_value_width
    convolved = 2 * size.linear_key_width + value
    return (
        ("linear_attn.dt_bias", (heads,)),
        ("linear_attn.A_log", (heads,)),
        ("linear_attn.conv1d.weight", (convolved, 1, size.linear_conv_kernel_dim)),
        ("linear_attn.norm.weight", (size.linear_value_head_dim,)),
        ("linear_attn.out_proj.weight", (hidden, value)),
        ("linear_attn.in_proj_qkv.weight", (convolved, hidden)),
        ("linear_attn.in_proj_z.weight", (value, hidden)),
        ("linear_attn.in_proj_b.weight", (heads, hidden)),
        ("linear_attn.in_proj_a.weight", (heads, hidden)),
    )


def _full_attention(size: ModelSize) -> _Shapes:
    hidden, query = size.hidden_size, size.num_attention_heads * size.head_dim
    key = size.num_key_value_heads * size.head_dim
    return (
        ("self_attn.q_proj.weight", (2 * query, hidden)),  # the second half is the output's gate
        ("self_attn.k_proj.weight", (key, hidden)),
        ("self_attn.v_proj.weight", (key, hidden)),
        ("self_attn.o_proj.weight", (hidden, query)),
        ("self_attn.q_norm.weight", (size.head_dim,)),
        ("self_attn.k_norm.weight", (size.head_dim,)),
    )


def _mlp(size: ModelSize) -> _Shapes:
    hidden, expert, shared = size.hidden_size, size.moe_intermediate_size, size.shared_expert_intermediate_size
    return (
        ("mlp.gate.weight", (size.num_experts, hidden)),
        ("mlp.experts.gate_up_proj", (size.num_experts, 2 * expert, hidden)),
        ("mlp.experts.down_proj", (size.num_experts, hidden, expert)),
        ("mlp.shared_expert.gate_proj.weight", (shared, hidden)),
        ("mlp.shared_expert.up_proj.weight", (shared, hidden)),
        ("mlp.shared_expert.down_proj.weight", (hidden, shared)),
        ("mlp.shared_expert_gate.weight", (1, hidden)),
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
    )


def _vision(size: VisionSize) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide, merged = size.hidden_size, size.intermediate_size, size.hidden_size * size.spatial_merge_size**2
    patch = (hidden, size.in_channels, size.temporal_patch_size, size.patch_size, size.patch_size)
    yield from (("patch_embed.proj.weight", patch), ("patch_embed.proj.bias", (hidden,)))
    yield "pos_embed.weight", (size.num_position_embeddings, hidden)
    block = {"norm1": (hidden,), "norm2": (hidden,), "attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden)}
    block |= {"mlp.linear_fc1": (wide, hidden), "mlp.linear_fc2": (hidden, wide)}
    for number in range(size.depth):
        yield from _with_bias(f"blocks.{number}.", block)
    merger = {"norm": (hidden,), "linear_fc1": (merged, merged), "linear_fc2": (size.out_hidden_size, merged)}
    yield from _with_bias("merger.", merger)


def _with_bias(prefix: str, weights: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in weights.items():
        yield f"{prefix}{name}.weight", shape
        yield f"{prefix}{name}.bias", shape[:1]
