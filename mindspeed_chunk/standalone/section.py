"""Reading a yaml key by key: types checked, errors of one line, and a record of what nobody asked for."""

import difflib
from dataclasses import MISSING, field, fields

import yaml

from mindspeed_chunk.config import ConfigError

DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}


def key(convert, default=MISSING):
    """A dataclass field that `Section.read_all` fills from the yaml key of its name; required without a default."""
    return field(default=default, metadata={"convert": convert})


class Section:
    """One mapping of the yaml. `read` hands out a key; `unused` names the keys that were never read."""

    def __init__(self, mapping, path):
        if not isinstance(mapping, dict | None):
            raise ConfigError.about(path, mapping, "must be a mapping", "write its keys below it, indented")
        self.mapping = mapping or {}
        self.path = path
        self._used = set()
        self._children = []

    def at(self, name):
        return f"{self.path}.{name}" if self.path else str(name)

    def section(self, name):
        child = Section(self.mapping.get(name), self.at(name))
        self.mark_used([name])
        self._children.append(child)
        return child

    def read(self, name, convert, default=MISSING):
        """The value of a key as `convert` returns it; `default` where it is missing or null. Raises ConfigError."""
        self.mark_used([name])
        value = self.mapping.get(name)
        if value is None:
            if default is MISSING:
                raise ConfigError.about(self.at(name), None, "the trainer needs it", "add it to the yaml")
            return default
        try:
            return convert(value)
        except ValueError as error:
            raise ConfigError.about(self.at(name), value, str(error), "correct or remove it") from None

    def read_all(self, cls):
        return cls(**{f.name: self.read(f.name, f.metadata["convert"], f.default) for f in fields(cls)})

    def mark_used(self, keys):
        self._used.update(keys)

    def unused(self):
        """Paths of keys that nobody asked for, each with the key that it nearly is, if there is one."""
        own = [self.at(name) + self._meant(str(name)) for name in self.mapping if name not in self._used]
        return own + [name for child in self._children for name in child.unused()]

    def _meant(self, name):
        near = difflib.get_close_matches(name, map(str, self._used), n=1, cutoff=0.85)
        return f" (or {near[0]}?)" if near else ""


def integer(minimum):
    def convert(value):
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"must be an integer >= {minimum}")
        if value >= 2**63:
            raise ValueError("must be below 2^63")
        return value

    return convert


def number(minimum, below=float("inf")):
    def convert(value):
        try:
            # yaml reads 1e-4 (no dot) as text: taken as the number it means, as MindSpeed-MM does
            result = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            result = float("nan")
        if not minimum <= result < below:
            raise ValueError(f"must be a number >= {minimum:g}" + (f" and < {below:g}" if below < float("inf") else ""))
        return result

    return convert


def choice(*options):
    def convert(value):
        if isinstance(value, bool) or value not in options:
            raise ValueError(f"must be one of {', '.join(map(str, options))}")
        return value

    return convert


def dtype(value):
    return DTYPES[choice(*DTYPES)(value)]


def flag(value):
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def text(value):
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def names(value):
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a list of module names")
    return tuple(value)


def read_yaml(path):
    """The mapping in the file at `path`. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the path of a yaml file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid yaml: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError.about(path, content, "must be a mapping", "start from examples/qwen3_5_35b/tiny.yaml")
    return content


def override(content, argument):
    """Set one `key.path=value` in the mapping `content`; the value is read as yaml. Raises ConfigError."""
    name, equals, value = argument.partition("=")
    *parents, last = name.split(".")
    if not (last and equals):
        raise ConfigError(f"{argument}: must read key.path=value; for example training.train_iters=5")
    for parent in parents:
        if content.get(parent) is None:
            content[parent] = {}
        content = content[parent]
        if not isinstance(content, dict):
            raise ConfigError.about(argument, content, f"`{parent}` is no mapping in the yaml", "correct the path")
    try:
        content[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"{argument}: the value is not valid yaml; quote it") from None
