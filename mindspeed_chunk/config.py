"""The settings of Chunk MoE and of ChunkMBS. A wrong value is one line: the key, the value, the rule, the way out."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_chunk.values import BATCH_DIM, FLAG, INDICES, MAPPING, NAMES, ConfigError, ValueRule, choice, integer

# An `ep_plan` belongs to the host; of its keys only those with these beginnings are ours to know or to refuse.
KEY_PREFIXES = ("moe_", "chunk_moe_")
SCHEDULES = ("rolling", "pair")
KEEPS = ("activations", "rows", "input")
DISPATCHES = ("auto", "per_expert", "per_rank")
BACKENDS = ("auto", "cpu", "cuda", "npu")
_MAYBE_SET = integer(0, "use 0 or remove the key to leave it unset")


def _setting(default: Any, rule: ValueRule) -> Any:
    """A field with its rule, which docs/config.md shows with its meaning from the docstring of the class."""
    return dataclasses.field(default=default, metadata={"rule": rule})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkMoEConfig:
    """How the tokens of an MoE layer are cut into chunks, and how the chunks run.

    moe_num_chunks: number of chunks; 0: not set.
    moe_chunk_size: tokens per chunk. The rank with the most tokens decides the number of chunks; 0: not set.
        Both 0: one chunk. Both set: `moe_num_chunks` wins, and one warning says so.
    chunk_moe_auto: choose the number of chunks in the first call, from its rows and from rates measured there. Later
        calls use the same number.
    chunk_moe_max_rows: cut a call into 2, 4, ... times as many chunks, up to about 16 chunks, if the experts of some
        rank would get more rows of one chunk than this; 0: not set.
    chunk_moe_keep: what a layer keeps for its backward. "activations": the rows at the experts and the output of fc1.
        "rows": only the rows; fc1 runs again. "input": only the layer's input; its rows are dispatched again, with the
        gradients, and fc1 runs again. "": as `chunk_moe_recompute` says.
    chunk_moe_recompute: short form of `chunk_moe_keep`: true is "rows", false is "activations".
    chunk_moe_skip_unread: in the recompute of a block, leave out the second expert matmul and the combine, if the
        forward showed that nothing after the layer keeps its output. Only torch's own operations are seen. Do not use
        it if a block has hand-written kernels or Functions after the layer, or if ranks run different operations there.
    chunk_moe_dispatch: what is sent to the experts. "per_expert": a row for each of a token's K experts. "per_rank": a
        row for each rank that has some of them, which is fewer. "auto": the latter if it sends at most 0.9 of the
        bytes with uniform routing. With one rank or K = 1 it is always "per_expert".
    chunk_moe_schedule: "rolling" (a chunk's all-to-alls overlap with both neighbours) or "pair" (two chunks at a time).
    chunk_moe_lookahead: number of chunks that "rolling" dispatches ahead of the chunk whose experts run; each beyond 1
        needs buffers for one more chunk.
    chunk_moe_overlap_shared_expert: in Qwen3.5's MoE block, compute the shared expert during the first dispatch, and
        its gradients while the last rows return.
    chunk_moe_backend: "auto" (by the device of the tensors) or the one back end to use: "cpu", "cuda", "npu".

    Raises ConfigError for a value of the wrong type or out of range.
    """

    moe_num_chunks: int = _setting(0, _MAYBE_SET)
    moe_chunk_size: int = _setting(0, _MAYBE_SET)
    chunk_moe_auto: bool = _setting(False, FLAG)
    chunk_moe_max_rows: int = _setting(0, _MAYBE_SET)
    chunk_moe_recompute: bool = _setting(False, FLAG)
    chunk_moe_keep: str = _setting("", choice(*KEEPS, also=("",)))
    chunk_moe_skip_unread: bool = _setting(False, FLAG)
    chunk_moe_dispatch: str = _setting("auto", choice(*DISPATCHES))
    chunk_moe_schedule: str = _setting("rolling", choice(*SCHEDULES))
    chunk_moe_lookahead: int = _setting(1, integer(0, "remove the key to get 1"))
    chunk_moe_overlap_shared_expert: bool = _setting(False, FLAG)
    chunk_moe_backend: str = _setting("auto", choice(*BACKENDS))

    def __post_init__(self) -> None:
        _taken(type(self), vars(self), "")
        if self.both_sizes:
            _warn(self.both_sizes)
        _check_together(vars(self), "")

    @property
    def keep(self) -> str:
        """One of `KEEPS`."""
        return self.chunk_moe_keep or ("rows" if self.chunk_moe_recompute else "activations")

    @property
    def both_sizes(self) -> str:
        """What there is to say where both sizes are set; empty where not."""
        if not (self.moe_num_chunks and self.moe_chunk_size):
            return ""
        return (
            f"moe_num_chunks ({self.moe_num_chunks}) and moe_chunk_size ({self.moe_chunk_size}) are both set: "
            "moe_num_chunks is used, moe_chunk_size is not; set one of them"
        )

    @classmethod
    def from_mapping(cls, mapping: object, path: str = "parallel.ep_plan") -> ChunkMoEConfig:
        """Take the keys of this class out of the host's `ep_plan` mapping, which is at `path` of the yaml.

        Keys of the host are left alone. Raises ConfigError for a wrong value, and for a key that begins with `moe_` or
        `chunk_moe_` and is not one of ours.
        """
        ours = _ours(cls, mapping, path, "parallel.ep_plan", lambda key: str(key).startswith(KEY_PREFIXES))
        _check_together({field.name: field.default for field in dataclasses.fields(cls)} | ours, f"{path}.")
        return cls(**ours)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkMBSConfig:
    """How the batch of a block is cut into micro-chunks.

    apply_modules: names of the blocks, with MindSpeed-MM's wildcards.
    chunk_mbs: samples per micro-chunk.
    batch_dim: the batch's dimension in the hidden states: 0 for [B, S, H], 1 for [S, B, H].
    chunk_arg_indexs: positions of arguments that contain the batch: tensors, or tuples and dictionaries of tensors,
        with the batch's size or 1 on `batch_dim`. The first one gives the batch's size.
    chunk_kwarg_names: names of further arguments that contain the batch. Without positions, the first of these gives
        the batch's size.
    chunk_whole_names: arguments that are passed whole, although one of their dimensions has the batch's size.
    chunk_infer: also cut other tensors that have the batch's size on `batch_dim` and the sequence length next to it. If
        rows may be samples only by chance, the first call says that they must be named.

    Raises ConfigError for a value of the wrong type or out of range.
    """

    apply_modules: tuple[str, ...] = _setting((), NAMES)
    chunk_mbs: int = _setting(1, integer(1, "give the samples of one micro-chunk"))
    batch_dim: int = _setting(0, BATCH_DIM)
    chunk_arg_indexs: tuple[int, ...] = _setting((0,), INDICES)
    chunk_kwarg_names: tuple[str, ...] = _setting((), NAMES)
    chunk_whole_names: tuple[str, ...] = _setting((), NAMES)
    chunk_infer: bool = _setting(True, FLAG)

    def __post_init__(self) -> None:
        for name, value in _taken(type(self), vars(self), "").items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_mapping(cls, mapping: object, path: str = "features.chunkmbs_plan") -> ChunkMBSConfig:
        """Read the host's `chunkmbs_plan`.

        Raises ConfigError for a wrong value, an unknown key, or where no argument would be cut.
        """
        made = cls(**_ours(cls, mapping, path, "features.chunkmbs_plan", lambda key: True))
        if not (made.chunk_infer or made.chunk_arg_indexs or made.chunk_kwarg_names):
            way_out = "name some in chunk_arg_indexs, or remove the key"
            raise ConfigError.about(f"{path}.chunk_infer", False, "no argument would be cut", way_out)
        return made


def _ours(cls: type, mapping: Any, path: str, section: str, must_be_known: Callable[[object], bool]) -> dict[str, Any]:
    """The entries of `mapping`, which is this `section`, that are fields of `cls`; none else may be `must_be_known`."""
    names = [field.name for field in dataclasses.fields(cls)]
    for key, value in MAPPING.take(path, mapping).items():
        if key not in names and must_be_known(key):
            from mindspeed_chunk.keys import unknown  # which is made of these classes

            raise unknown(f"{path}.{key}", value, section, f"known are {', '.join(names)}")
    return _taken(cls, {key: value for key, value in mapping.items() if key in names}, f"{path}.")


def _taken(cls: type, settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values of fields of `cls`. Raises ConfigError where one breaks its rule; the key is `prefix` and the name."""
    rules = {field.name: field.metadata["rule"] for field in dataclasses.fields(cls)}
    return {name: rules[name].take(f"{prefix}{name}", value) for name, value in settings.items()}


def _check_together(settings: Mapping[str, Any], prefix: str) -> None:
    """Raise ConfigError where a setting of ChunkMoEConfig contradicts another."""

    def refuse(name: str, rule: str) -> None:
        raise ConfigError.about(f"{prefix}{name}", settings[name], rule, "remove one of the two")

    if settings["chunk_moe_recompute"] and settings["chunk_moe_keep"] not in ("", "rows"):
        refuse("chunk_moe_keep", "contradicts chunk_moe_recompute: true")
    if settings["chunk_moe_schedule"] == "pair" and settings["chunk_moe_lookahead"] != 1:
        refuse("chunk_moe_lookahead", "has no meaning with chunk_moe_schedule: pair")
    for name in ("moe_num_chunks", "moe_chunk_size"):
        if settings["chunk_moe_auto"] and settings[name]:
            refuse(name, "contradicts chunk_moe_auto: true, which chooses")
    if settings["chunk_moe_max_rows"] and settings["moe_chunk_size"] and not settings["moe_num_chunks"]:
        refuse("chunk_moe_max_rows", "has no meaning with moe_chunk_size, which bounds the chunks' tokens")


@functools.cache
def _warn(message: str) -> None:
    # Cached: each layer may carry its own config, and the user needs to read this once.
    warnings.warn(message, stacklevel=4)
