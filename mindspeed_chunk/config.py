"""What a user may set. A wrong value is one line that says where it stands, what it is and what it may be."""

import dataclasses
import difflib
import functools
import warnings
from collections.abc import Mapping

# An `ep_plan` belongs to the host; of its keys only those with these beginnings are ours to know or to refuse.
KEY_PREFIXES = ("moe_", "chunk_moe_")
SCHEDULES = ("rolling", "pair")
BACKENDS = ("auto", "cpu", "cuda", "npu")
SHOWN_CHARS = 80


class ConfigError(ValueError):
    """A setting is wrong; the message is one line."""

    @classmethod
    def about(cls, path, value, rule, way_out):
        """The error "<yaml path>: <value>: <rule>; <way out>"."""
        shown = " ".join(repr(value).split())
        if len(shown) > SHOWN_CHARS:
            shown = shown[:SHOWN_CHARS] + "..."
        return cls(f"{path}: {shown}: {rule}; {way_out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkMoEConfig:
    """How the tokens of an MoE layer are cut into chunks, and how the chunks run.

    moe_num_chunks: number of chunks; 0: not set.
    moe_chunk_size: tokens a chunk, and the rank with the most tokens decides on the number of chunks; 0: not set.
        Both 0: one chunk. Both set: `moe_num_chunks` wins, and one warning says so.
    chunk_moe_recompute: compute the expert FFN again in the backward instead of keeping its activations.
    chunk_moe_schedule: "rolling" (a chunk's all-to-alls overlap with both neighbours) or "pair" (two chunks at a time).
    chunk_moe_backend: "auto" (by the device of the tensors) or the one back end to use: "cpu", "cuda", "npu".

    Raises ConfigError for a value of the wrong type or out of range.
    """

    moe_num_chunks: int = 0
    moe_chunk_size: int = 0
    chunk_moe_recompute: bool = False
    chunk_moe_schedule: str = "rolling"
    chunk_moe_backend: str = "auto"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), field.name)
        if self.moe_num_chunks and self.moe_chunk_size:
            _warn_of_both(self.moe_num_chunks, self.moe_chunk_size)

    @classmethod
    def from_mapping(cls, mapping, path="parallel.ep_plan"):
        """Take the keys of this class out of the host's `ep_plan` mapping, which stands at `path` of the yaml.

        Keys of the host are left alone. Raises ConfigError for a wrong value, and for a key that begins with `moe_` or
        `chunk_moe_` and is none of ours.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError.about(path, mapping, "must be a mapping", f"write for example {path}.moe_num_chunks: 2")
        names = [field.name for field in dataclasses.fields(cls)]
        values = {}
        for key, value in mapping.items():
            if key in names:
                _check(key, value, f"{path}.{key}")
                values[key] = value
            elif isinstance(key, str) and key.startswith(KEY_PREFIXES):
                nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
                raise ConfigError.about(f"{path}.{key}", value, "unknown key", f"the nearest one is {nearest}")
        return cls(**values)


def _check(name, value, path):
    """Raise ConfigError where `value` breaks the rule of the field `name`."""
    if name in ("moe_num_chunks", "moe_chunk_size"):
        # A boolean is an int in Python, and `moe_num_chunks: true` is nobody's intention.
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError.about(path, value, "must be an integer >= 0", "use 0 or remove the key to leave it unset")
    elif name == "chunk_moe_recompute":
        if not isinstance(value, bool):
            raise ConfigError.about(path, value, "must be a boolean", "write true or false, without quotes")
    elif name == "chunk_moe_schedule":
        _check_choice(path, value, SCHEDULES)
    else:
        _check_choice(path, value, BACKENDS)


def _check_choice(path, value, choices):
    if not isinstance(value, str) or value not in choices:
        raise ConfigError.about(
            path, value, f"must be one of {', '.join(choices)}", f"remove the key to get {choices[0]}"
        )


@functools.cache
def _warn_of_both(num_chunks, chunk_size):
    # Cached: each layer may carry its own config, and the user needs to read this once.
    warnings.warn(
        f"moe_num_chunks ({num_chunks}) and moe_chunk_size ({chunk_size}) are both set: moe_num_chunks is used, "
        "moe_chunk_size is not; set one of them",
        stacklevel=4,
    )
