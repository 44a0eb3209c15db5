"""Corrections of a yaml's text, which leave every other character as it is.

Each is tried on a copy, which must have exactly the intended content, with values of the right types. Two kinds of
edits are not made. One inside an anchor that is used elsewhere would change more than intended. And under its correct
name, a key may have a value of a wrong type.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import yaml

from mindspeed_chunk import keys
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.lint.document import Document

_LINE_END = re.compile(r"\r?\n|$")


@dataclass(frozen=True)
class Rename:
    """A key, in its mapping."""

    path: str
    to: str

    def on_data(self, parent: dict, key: str) -> None:
        parent[self.to] = parent.pop(key)

    def on_text(self, document: Document) -> str:
        key, _ = _nodes_at(document, self.path)
        return _replaced(document.text, key, self.to)


@dataclass(frozen=True)
class Set:
    """An existing plain value."""

    path: str
    value: object

    def on_data(self, parent: dict, key: str) -> None:
        parent[key] = self.value

    def on_text(self, document: Document) -> str:
        _, value = _nodes_at(document, self.path)
        return _replaced(document.text, value, _written(self.value))


@dataclass(frozen=True)
class Remove:
    """A key with a plain value, and its line."""

    path: str

    def on_data(self, parent: dict, key: str) -> None:
        del parent[key]

    def on_text(self, document: Document) -> str:
        key, value = _nodes_at(document, self.path)
        lines = document.text.splitlines(keepends=True)
        del lines[key.start_mark.line : value.end_mark.line + 1]
        return "".join(lines)


@dataclass(frozen=True)
class Append:
    """To an existing list of names that is not empty."""

    path: str
    item: str

    def on_data(self, parent: dict, key: str) -> None:
        parent[key] = [*parent[key], self.item]

    def on_text(self, document: Document) -> str:
        _, value = _nodes_at(document, self.path)
        text, last = document.text, value.value[-1]
        end = last.end_mark.index
        if isinstance(value, yaml.CollectionNode) and value.flow_style:
            return f"{text[:end]}, {_written([self.item])[1:-1]}{text[end:]}"
        # after everything in the last item's line
        line_end = next(_LINE_END.finditer(text, end))
        end, line = line_end.start(), text.rfind("\n", 0, last.start_mark.index) + 1
        dash = text[line : last.start_mark.index]
        return "".join((text[:end], line_end.group() or "\n", dash, _written(self.item), text[end:]))


Edit = Rename | Set | Remove | Append


def apply(document: Document, edit: Edit) -> Document | None:
    """The corrected document; None if the edit cannot be made, or would change anything else."""
    *parents, key = edit.path.split(".")
    try:
        meant = parent = _unshared(document.data)
        for segment in parents:
            parent = parent[segment]
        edit.on_data(parent, key)
        made = Document(edit.on_text(document), document.name)
        keys.read(made.data)
        return made if made.data == meant else None
    # no such place, text with another content, or a value of a wrong type
    except (KeyError, IndexError, TypeError, AttributeError, ConfigError):
        return None


def _unshared(data: Any) -> Any:
    """A copy without shared objects, even where the yaml uses aliases."""
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_unshared(value) for value in data]
    return copy.copy(data)


def _nodes_at(document: Document, path: str) -> tuple[yaml.Node, yaml.Node]:
    nodes = document.find(path)
    if nodes is None:
        raise KeyError(path)
    return nodes


def _replaced(text: str, node: yaml.Node, new: str) -> str:
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]


def _written(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
