"""Keys of the yaml and environment variables: rules, defaults and meanings as the code has them."""

import dataclasses
import inspect
import json
import re

from markdown_table import table
from mindspeed_chunk import keys
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig
from mindspeed_chunk.patches.settings import VARIABLES
from mindspeed_chunk.values import ValueRule

HEAD = ("key", "must be", "default", "meaning")


def chunk_moe() -> str:
    return _fields(ChunkMoEConfig)


def chunk_mbs() -> str:
    return _fields(ChunkMBSConfig)


def trainer() -> str:
    return table(HEAD, [(f"`{path}`", *rest) for path, *rest in trainer_keys()])


def trainer_keys() -> list[tuple[str, str, str, str]]:
    """Path, rule, default and meaning of each key that the trainer reads itself."""
    found = {keys.joined(section, name): key for section in keys.PATHS for name, key in keys.at(section).items()}
    return [
        (path, _rule(key.trainer), _shown(key.default), key.meaning)
        for path, key in sorted(found.items())
        if isinstance(key, keys.Key) and key.trainer
    ]


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
        rows.append((f"`{field.name}`", _rule(field.metadata["rule"]), _shown(field.default), said[field.name]))
    return table(HEAD, rows)


def _rule(rule: ValueRule) -> str:
    return rule.words.removeprefix("must be ")


def _shown(default: object) -> str:
    if default is keys.REQUIRED:
        return "required"
    if default is None:
        return "not set"
    return f"`{default if default and isinstance(default, str) else json.dumps(default)}`"
