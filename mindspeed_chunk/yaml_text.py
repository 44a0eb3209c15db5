"""One reader of yamls for lint, the embedded trainer and device files: accepts what `yaml.safe_load` does, with limits.

A yaml of some thousand characters can expand to more than any memory holds. So nodes are counted before anything is
built from them, again for each use of an alias.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mindspeed_chunk.values import INTEGERS_BELOW, ConfigError
from mindspeed_chunk.wording import shortened, shown

MAX_BYTES = 64 * 1024  # of a file; the largest stock yaml of MindSpeed-MM has 6 KiB
MAX_VALUES = 20_000  # keys, values, lists and mappings, counted again for each use of an alias
MAX_DEPTH = 50  # levels of nested mappings and lists
_MERGE = "tag:yaml.org,2002:merge"
# A text that begins with these bytes has that encoding; the longer ones come first.
_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class Unreadable(ConfigError):
    """The file is not a configuration; the message is one line."""


class ParsedYaml(NamedTuple):
    """A yaml's nodes, with merges (<<) resolved, and their values. Both None for an empty yaml."""

    root: yaml.Node | None
    data: Any


def read(path: Path) -> str:
    """The text of a file, line ends as they are. Raises Unreadable."""
    name = shortened(os.fspath(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a name may have characters that no file name can have
        reason = getattr(error, "strerror", None) or str(error)
        raise Unreadable(f"{name}: cannot be read: {reason}; give the path of a yaml file") from None
    if len(data) > MAX_BYTES:
        raise Unreadable(f"{name}: larger than {MAX_BYTES // 1024} KiB; give a yaml file")
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            raise Unreadable(f"{name}: {encoding} text; save it as UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"{name}:{line}: not UTF-8 text, at byte {error.start}; save it as UTF-8") from None


def sections(text: str, name: str) -> ParsedYaml:
    """The content of a whole file, which must be a mapping. Raises Unreadable."""
    parsed = load(text, name)
    if not isinstance(parsed.data, dict):
        kind = type(parsed.data).__name__ if parsed.data is not None else "empty"
        raise Unreadable(f"{name}: must be a mapping of sections, not {kind}; start from a stock yaml")
    return parsed


def load(text: str, name: str) -> ParsedYaml:
    """The content of the text.

    Raises:
        Unreadable: for a text that `yaml.safe_load` refuses, for a key that is twice in one mapping (`safe_load` would
            silently take the last one), and for a text beyond the limits.
    """
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        _refuse_doubles(loader, name)
        # this also resolves merges in the nodes
        return ParsedYaml(root, None if root is None else loader.construct_document(root))
    except yaml.YAMLError as error:
        raise Unreadable(_message(error, name)) from None
    finally:
        if loader is not None:
            loader.dispose()


class _Limit(yaml.MarkedYAMLError):
    """A valid yaml that is beyond the limits."""


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, with limits; an error in a value is reported as one of the yaml, with its place."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        # number of values and of levels of each complete node, by its id, with aliases written out
        self._sizes: dict[int, tuple[int, int]] = {}
        self.nodes: list[yaml.Node] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        aliased = isinstance(event, yaml.AliasEvent)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Limit(problem=f"more than {MAX_DEPTH} nested levels", problem_mark=event.start_mark)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if aliased:
            if id(node) not in self._sizes:
                problem = f"the alias {shortened(event.anchor)} is inside its own anchor"
                raise _Limit(problem=problem, problem_mark=event.start_mark)
            return node
        inner = [self._sizes[id(each)] for each in _children(node)]
        values = 1 + sum(size for size, _ in inner)
        levels = 1 + max((depth for _, depth in inner), default=0)
        if values > MAX_VALUES or levels > MAX_DEPTH:
            limit = f"{MAX_VALUES} values" if values > MAX_VALUES else f"{MAX_DEPTH} nested levels"
            raise _Limit(problem=f"more than {limit}, with aliases written out", problem_mark=event.start_mark)
        self._sizes[id(node)] = values, levels
        self.nodes.append(node)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            made = super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # PyYAML raises many kinds of errors for a text that is not a value of its type
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            problem = f"{shown(node.value)} is not a valid {shortened(kind)}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        if isinstance(made, int) and not -INTEGERS_BELOW <= made < INTEGERS_BELOW:
            raise _Limit(problem="an integer of more than 64 bits", problem_mark=node.start_mark)
        return made


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for entry in node.value:
            yield from entry
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _refuse_doubles(loader: _Loader, name: str) -> None:
    # in the order of the text
    for node in sorted(loader.nodes, key=lambda node: node.start_mark.index):
        if isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                    continue
                line, which = key.start_mark.line + 1, (key.tag, key.value)
                if which in lines:
                    raise Unreadable(
                        f"{name}:{line}: {shortened(key.value)}: given twice, in line {lines[which]} and here, and "
                        "the loader would silently take the last one; remove one"
                    )
                lines[which] = line


def _message(error: yaml.YAMLError, name: str) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{name}: not valid yaml: {' '.join(str(error).split())}"
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}" if mark else name
    problem = error.problem or error.context or "no reason given"
    if isinstance(error, _Limit):
        return f"{place}: {problem}, which is not supported; make it smaller"
    if "'\\t'" in problem:
        return f"{place}: a tab where yaml allows only spaces; indent with spaces"
    if error.context_mark and "duplicate anchor" in (error.context or ""):
        first = error.context_mark.line + 1
        return f"{place}: not valid yaml: line {first} already has an anchor of this name; rename one"
    return f"{place}: not valid yaml: {' '.join(problem.split())}; correct the line, or the one before it"
