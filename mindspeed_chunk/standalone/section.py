"""Reading a yaml key by key: types checked, errors of one line, and a record of what nobody asked for."""

from dataclasses import MISSING, field, fields

from mindspeed_chunk import keys, yaml_text
from mindspeed_chunk.config import INTEGERS_BELOW, ConfigError
from mindspeed_chunk.wording import one_line, shortened

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
        """Paths of keys that nobody asked for, with their values, and the section that each is in."""
        own = [(self.at(name), value, self.path) for name, value in self.mapping.items() if name not in self._used]
        return own + [each for child in self._children for each in child.unused()]


def warnings_of(unused):
    """One warning for each of the `unused` that is nearly a key of its section, and one for all others."""
    others = []
    for path, value, section in unused:
        if keys.nearest(path.rpartition(".")[2], section):
            yield str(keys.unknown(path, value, section))
        else:
            others.append(path)
    if others:
        yield one_line(f"without effect in this trainer: {', '.join(others)}")


def integer(minimum):
    def convert(value):
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"must be an integer >= {minimum}")
        if value >= INTEGERS_BELOW:
            raise ValueError("must be below 2^63")
        return value

    return convert


def number(minimum, below=float("inf")):
    def convert(value):
        try:
            # yaml reads 1e-4 (no dot) as text: taken as the number it means, as MindSpeed-MM does
            result = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError):
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


def override(content, argument):
    """Set one `key.path=value` in the mapping `content`; the value is read as yaml. Raises ConfigError."""
    name, equals, value = argument.partition("=")
    *parents, last = name.split(".")
    if not (equals and all((*parents, last))):
        raise ConfigError(f"{shortened(argument)}: must read key.path=value; for example training.train_iters=5")
    for parent in parents:
        inner = {} if content.get(parent) is None else content[parent]
        if not isinstance(inner, dict):
            raise ConfigError.about(argument, inner, f"`{parent}` is no mapping in the yaml", "correct the path")
        # a copy: an alias elsewhere in the yaml may name the same mapping
        content[parent] = content = dict(inner)
    content[last] = yaml_text.load(value, shortened(argument)).data
