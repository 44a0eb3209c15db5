"""What a user may set. A wrong value is one line that says where it stands, what it is and what it may be."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import warnings
from collections.abc import Mapping

# An `ep_plan` belongs to the host; of its keys only those with these beginnings are ours to know or to refuse.
KEY_PREFIXES = ("moe_", "chunk_moe_")
SCHEDULES = ("rolling", "pair")
KEEPS = ("activations", "rows", "input")
BACKENDS = ("auto", "cpu", "cuda", "npu")
SHOWN_CHARS = 80


class ConfigError(ValueError):
    """A setting is wrong; the message is one line. `path`: the key of the yaml that it is about, or empty."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    @classmethod
    def about(cls, path: str, value: object, rule: str, way_out: str) -> ConfigError:
        """The error "<yaml path>: <value>: <rule>; <way out>"."""
        shown = " ".join(repr(value).split())
        if len(shown) > SHOWN_CHARS:
            shown = shown[:SHOWN_CHARS] + "..."
        return cls(f"{path}: {shown}: {rule}; {way_out}", path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkMoEConfig:
    """How the tokens of an MoE layer are cut into chunks, and how the chunks run.

    moe_num_chunks: number of chunks; 0: not set.
    moe_chunk_size: tokens a chunk, and the rank with the most tokens decides on the number of chunks; 0: not set.
        Both 0: one chunk. Both set: `moe_num_chunks` wins, and one warning says so.
    chunk_moe_auto: choose the number of chunks at the first call, from its rows and from rates measured there, and
        keep to it.
    chunk_moe_max_rows: cut a call into 2, 4, ... times as many chunks, up to 16 or a little more, where one would bring
        some rank's experts more rows than this; 0: not set.
    chunk_moe_keep: what a layer keeps for its backward. "activations": the rows at the experts and what fc1 makes of
        them. "rows": the rows alone, and fc1 runs again. "input": the layer's input alone; its rows are dispatched
        again, with the gradients, and fc1 runs again. "": as `chunk_moe_recompute` says.
    chunk_moe_recompute: true for "rows", false for "activations".
    chunk_moe_skip_unread: where a block is recomputed, and its forward has shown that nothing behind the layer keeps
        any of its output, leave out the second expert matmul and the combine of the recompute. What is seen are torch's
        own operations: not for blocks with hand-written kernels or Functions behind the layer, nor for ranks whose
        blocks run different operations there.
    chunk_moe_schedule: "rolling" (a chunk's all-to-alls overlap with both neighbours) or "pair" (two chunks at a time).
    chunk_moe_lookahead: chunks that "rolling" dispatches ahead of the one whose experts run; each beyond 1 is one more
        that owns buffers.
    chunk_moe_overlap_shared_expert: in Qwen3.5's MoE block, compute the shared expert while the first dispatch is on
        the wire, and its gradients while the last rows travel back.
    chunk_moe_backend: "auto" (by the device of the tensors) or the one back end to use: "cpu", "cuda", "npu".

    Raises ConfigError for a value of the wrong type or out of range.
    """

    moe_num_chunks: int = 0
    moe_chunk_size: int = 0
    chunk_moe_auto: bool = False
    chunk_moe_max_rows: int = 0
    chunk_moe_recompute: bool = False
    chunk_moe_keep: str = ""
    chunk_moe_skip_unread: bool = False
    chunk_moe_schedule: str = "rolling"
    chunk_moe_lookahead: int = 1
    chunk_moe_overlap_shared_expert: bool = False
    chunk_moe_backend: str = "auto"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), field.name)
        if self.both_sizes:
            _warn(self.both_sizes)
        _check_together(dataclasses.asdict(self), "")

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
        """Take the keys of this class out of the host's `ep_plan` mapping, which stands at `path` of the yaml.

        Keys of the host are left alone. Raises ConfigError for a wrong value, and for a key that begins with `moe_` or
        `chunk_moe_` and is none of ours.
        """
        ours = _ours(cls, mapping, path, lambda key: isinstance(key, str) and key.startswith(KEY_PREFIXES))
        for key, value in ours.items():
            _check(key, value, f"{path}.{key}")
        _check_together({field.name: field.default for field in dataclasses.fields(cls)} | ours, f"{path}.")
        return cls(**ours)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkMBSConfig:
    """How the batch of a block is cut into micro-chunks.

    apply_modules: names of the blocks, with MindSpeed-MM's wildcards.
    chunk_mbs: samples a micro-chunk.
    batch_dim: the batch's dimension in the hidden states: 0 for [B, S, H], 1 for [S, B, H].
    chunk_arg_indexs, chunk_kwarg_names: arguments that carry the batch, by position and by name: tensors, or tuples and
        dictionaries of them, with the batch's size or 1 on `batch_dim`. The first says how large the batch is.
    chunk_whole_names: arguments that are passed whole although a dimension of theirs has the batch's size.
    chunk_infer: cut other tensors, too, whose `batch_dim` has the batch's size.

    Raises ConfigError for a value of the wrong type or out of range.
    """

    apply_modules: tuple[str, ...] = ()
    chunk_mbs: int = 1
    batch_dim: int = 0
    chunk_arg_indexs: tuple[int, ...] = (0,)
    chunk_kwarg_names: tuple[str, ...] = ()
    chunk_whole_names: tuple[str, ...] = ()
    chunk_infer: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _check_mbs(field.name, value, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))

    @classmethod
    def from_mapping(cls, mapping: object, path: str = "features.chunkmbs_plan") -> ChunkMBSConfig:
        """Read the host's `chunkmbs_plan`.

        Raises ConfigError for a wrong value, an unknown key, or where no argument would be cut.
        """
        ours = _ours(cls, mapping, path, lambda key: True)
        for key, value in ours.items():
            _check_mbs(key, value, f"{path}.{key}")
        made = cls(**ours)
        if not (made.chunk_infer or made.chunk_arg_indexs or made.chunk_kwarg_names):
            way_out = "name some in chunk_arg_indexs, or remove the key"
            raise ConfigError.about(f"{path}.chunk_infer", False, "no argument would be cut", way_out)
        return made


def _ours(cls, mapping, path, must_be_known):
    """The entries of `mapping` that are fields of `cls`; of the others, none may be one that `must_be_known`."""
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(mapping, Mapping):
        raise ConfigError.about(path, mapping, "must be a mapping", f"write for example {path}.{names[0]}")
    for key, value in mapping.items():
        if key not in names and must_be_known(key):
            nearest = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
            raise ConfigError.about(f"{path}.{key}", value, "unknown key", f"the nearest one is {nearest}")
    return {key: value for key, value in mapping.items() if key in names}


def _check(name, value, path):
    """Raise ConfigError where `value` breaks the rule of the field `name`."""
    if name in ("moe_num_chunks", "moe_chunk_size", "chunk_moe_max_rows"):
        if not _is_integer(value, 0):
            raise ConfigError.about(path, value, "must be an integer >= 0", "use 0 or remove the key to leave it unset")
    elif name == "chunk_moe_lookahead":
        if not _is_integer(value, 0):
            raise ConfigError.about(path, value, "must be an integer >= 0", "remove the key to get 1")
    elif name in (
        "chunk_moe_auto", "chunk_moe_recompute", "chunk_moe_skip_unread", "chunk_moe_overlap_shared_expert"
    ):  # fmt: skip
        if not isinstance(value, bool):
            raise ConfigError.about(path, value, "must be a boolean", "write true or false, without quotes")
    elif name == "chunk_moe_keep":
        if value != "":
            _check_choice(path, value, KEEPS)
    elif name == "chunk_moe_schedule":
        _check_choice(path, value, SCHEDULES)
    else:
        _check_choice(path, value, BACKENDS)


def _check_together(settings, prefix):
    """Raise ConfigError where a setting of ChunkMoEConfig contradicts another."""

    def refuse(name, rule):
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


def _check_mbs(name, value, path):
    """Raise ConfigError where `value` breaks the rule of ChunkMBSConfig's field `name`."""
    if name == "chunk_mbs":
        if not _is_integer(value, 1):
            raise ConfigError.about(path, value, "must be an integer >= 1", "give the samples of one micro-chunk")
    elif name == "batch_dim":
        if not _is_integer(value, 0) or value > 1:
            raise ConfigError.about(path, value, "must be 0 or 1", "write 0 for [B, S, H], 1 for [S, B, H]")
    elif name == "chunk_infer":
        if not isinstance(value, bool):
            raise ConfigError.about(path, value, "must be a boolean", "write true or false, without quotes")
    elif name == "chunk_arg_indexs":
        if not isinstance(value, list | tuple) or not all(_is_integer(item, 0) for item in value):
            raise ConfigError.about(path, value, "must be a list of integers >= 0", "write [0], or [] for none")
    elif not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError.about(path, value, "must be a list of names", "write [] for none")


def _is_integer(value, least):
    # A boolean is an int in Python, and `moe_num_chunks: true` is nobody's intention.
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_choice(path, value, choices):
    if not isinstance(value, str) or value not in choices:
        raise ConfigError.about(
            path, value, f"must be one of {', '.join(choices)}", f"remove the key to get {choices[0]}"
        )


@functools.cache
def _warn(message):
    # Cached: each layer may carry its own config, and the user needs to read this once.
    warnings.warn(message, stacklevel=4)
