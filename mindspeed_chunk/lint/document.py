"""A yaml as the host reads it (`yaml.safe_load`), which still knows in which line each key stands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mindspeed_chunk.config import ConfigError

_MERGE = "tag:yaml.org,2002:merge"


class Unreadable(ConfigError):
    """The file is no configuration; the message is one line."""


class Document:
    """The text and what it says.

    Attributes:
        data: what the host gets.

    Raises:
        Unreadable: for what the host's loader refuses, and for a key that stands twice in one mapping, of which the
            loader would silently take the last.
    """

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        loader = None
        try:
            loader = yaml.SafeLoader(text)
            self._root: Any = loader.get_single_node()
            _refuse_doubles(self._root, name)
            # merges (<<) are resolved into the nodes by this, too
            data = None if self._root is None else loader.construct_document(self._root)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise Unreadable(_told(error, name)) from None
        finally:
            if loader is not None:
                loader.dispose()
        if not isinstance(data, dict):
            kind = type(data).__name__ if data is not None else "empty"
            raise Unreadable(f"{name}: must be a mapping of sections, not {kind}; start from a stock yaml")
        self.data: dict[Any, Any] = data

    @classmethod
    def read(cls, path: Path) -> Document:
        try:
            with path.open(encoding="utf-8", newline="") as file:  # line ends as they are, for a corrected copy
                text = file.read()
        except OSError as error:
            raise Unreadable(f"{path}: cannot be read: {error.strerror}; give the path of a yaml file") from None
        except UnicodeDecodeError as error:
            raise Unreadable(f"{path}: not UTF-8 text, at byte {error.start}; give a yaml file") from None
        return cls(text, os.fspath(path))

    def find(self, path: str) -> tuple[yaml.Node, yaml.Node] | None:
        """The nodes of a key and of its value."""
        key = node = self._root
        for segment in filter(None, path.split(".")):
            entries = node.value if isinstance(node, yaml.MappingNode) else ()
            found = [entry for entry in entries if entry[0].value == segment]
            if not found:
                return None
            key, node = found[-1]
        return key, node

    def line(self, path: str, item: str = "") -> int:
        """Where the key stands, or an item of its list, from 1; where it does not, the nearest key around it."""
        while (place := self.find(path)) is None:
            path = path.rpartition(".")[0]
        key, value = place
        items = value.value if item and isinstance(value, yaml.SequenceNode) else ()
        found = next((node for node in items if node.value == item), key)
        return found.start_mark.line + 1


def _refuse_doubles(root: yaml.Node | None, name: str) -> None:
    for node in _nodes(root):
        if isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                    continue
                line, which = key.start_mark.line + 1, (key.tag, key.value)
                if which in lines:
                    raise Unreadable(
                        f"{name}:{line}: {key.value}: stands twice, in line {lines[which]} and here, and the loader "
                        "takes the last one silently; remove one"
                    )
                lines[which] = line


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """Every node once, however often aliases name it."""
    waiting, seen = [root] if root is not None else [], set()
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            if isinstance(node, yaml.MappingNode):
                waiting += [each for entry in node.value for each in entry]
            elif isinstance(node, yaml.SequenceNode):
                waiting += node.value


def _told(error: Exception, name: str) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{name}: not valid yaml: {' '.join(str(error).split())}"
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}" if mark else name
    problem = error.problem or error.context or "no reason given"
    if "'\\t'" in problem:
        return f"{place}: a tab where yaml takes spaces only; indent with spaces"
    if error.context_mark and "duplicate anchor" in (error.context or ""):
        first = error.context_mark.line + 1
        return f"{place}: not valid yaml: an anchor of this name stands in line {first} already; rename one"
    return f"{place}: not valid yaml: {' '.join(problem.split())}; correct the line, or the one before it"
