"""A rule, what it finds, and what it checks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from mindspeed_chunk import keys, model_config
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.lint.document import Document
from mindspeed_chunk.lint.edits import Edit

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, Severity, Severity] = ("error", "warning", "note")
ERROR, WARNING, NOTE = SEVERITIES

_Settings = TypeVar("_Settings")


class Problem(NamedTuple):
    """`error.path` is the place; in a list, `item` is the item.

    `edits`: the correction, if there is one right answer.
    """

    error: ConfigError
    edits: tuple[Edit, ...] = ()
    item: str = ""


@dataclass(frozen=True)
class Rule:
    """`says`: one sentence for the documentation. `find` yields what breaks the rule."""

    id: str
    severity: Severity
    says: str
    find: Callable[[Subject], Iterable[Problem]]


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: Severity
    path: str
    line: int
    message: str
    edits: tuple[Edit, ...]


class Subject:
    """The configuration that rules check.

    Args:
        world: number of ranks of the run; None if it is not known.
        devices_per_node: number of ranks that are connected by the fast link.
    """

    def __init__(self, document: Document, world: int | None, devices_per_node: int) -> None:
        self.document, self.world, self.devices_per_node = document, world, devices_per_node
        self.settings = keys.read(document.data)

    def get(self, path: str, default: Any = None) -> Any:
        """The value at the path; `default` if there is none, or null."""
        value: Any = self.settings
        for segment in path.split("."):
            value = value.get(segment) if isinstance(value, Mapping) else None
        return default if value is None else value

    @functools.cached_property
    def model_folder(self) -> Path | None:
        """The folder with the model's config.json, searched from the current folder and from the yaml's."""
        name = self.get("model.model_name_or_path")
        if not name:
            return None
        folders = (Path(name), Path(self.document.name).parent / name)
        return next((folder for folder in folders if model_config.has_config(folder)), None)

    @functools.cached_property
    def text_config(self) -> Mapping[str, object]:
        return model_config.read_text_config(self.model_folder)


def problems(check: Callable, *arguments: object, edits: Iterable[Edit] = ()) -> Iterator[Problem]:
    """The problems that a check of the features finds; these checks also run at start."""
    try:
        check(*arguments)
    except ConfigError as error:
        yield Problem(error, tuple(edits))


def read_leniently(
    read: Callable[[Mapping], _Settings], section: Mapping, path: str
) -> tuple[_Settings | None, list[ConfigError]]:
    """The result of `read(plan)` without the wrong keys, or None; and the error of each wrong key."""
    wrong: list[ConfigError] = []
    section = dict(section)
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a rule of lint reports it
                return read(section), wrong
        except ConfigError as error:
            if any(error.path == other.path for other in wrong):
                return None, wrong
            wrong.append(error)
            section.pop(error.path.removeprefix(f"{path}."), None)
