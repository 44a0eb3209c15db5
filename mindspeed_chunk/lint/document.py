"""A yaml as the host reads it, with the line of each key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from mindspeed_chunk import yaml_text
from mindspeed_chunk.yaml_text import Unreadable

__all__ = ["Document", "Unreadable"]


class Document:
    """The text and its content.

    Attributes:
        data: what the host gets.

    Raises:
        Unreadable: as `yaml_text.sections` does.
    """

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        parsed = yaml_text.sections(text, name)
        self._root: Any = parsed.root
        self.data: dict[Any, Any] = parsed.data

    @classmethod
    def read(cls, path: Path) -> Document:
        return cls(yaml_text.read(path), os.fspath(path))

    def find(self, path: str) -> tuple[yaml.Node, yaml.Node] | None:
        """The nodes of a key and of its value."""
        key = node = self._root
        for segment in filter(None, path.split(".")):
            entries = node.value if isinstance(node, yaml.MappingNode) else ()
            matching = [entry for entry in entries if entry[0].value == segment]
            if not matching:
                return None
            key, node = matching[-1]
        return key, node

    def line(self, path: str, item: str = "") -> int:
        """The line of the key, or of an item of its list, from 1; without such a key, of the nearest one around it."""
        while (place := self.find(path)) is None:
            path = path.rpartition(".")[0]
        key, value = place
        items = value.value if item and isinstance(value, yaml.SequenceNode) else ()
        node = next((each for each in items if each.value == item), key)
        return node.start_mark.line + 1
