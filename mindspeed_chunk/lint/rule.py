"""What a rule is, what it finds, and what it looks at."""

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
    """`error.path` says where; of a list, `item` says which one.

    `edits`: what would cure it, where there is one right answer.
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
    """The configuration that rules are held against.

    Args:
        world: ranks of the run; None where that is not known.
        devices_per_node: ranks that are joined by the fast link.
    """

    def __init__(self, document: Document, world: int | None, devices_per_node: int) -> None:
        self.document, self.world, self.devices_per_node = document, world, devices_per_node
        self.settings = keys.read(document.data)

    def get(self, path: str, default: Any = None) -> Any:
        """What stands at the path; `default` where nothing does, or null."""
        found: Any = self.settings
        for segment in path.split("."):
            found = found.get(segment) if isinstance(found, Mapping) else None
        return default if found is None else found

    @functools.cached_property
    def model_folder(self) -> Path | None:
        """The folder with the model's config.json, looked for from here and from the yaml."""
        name = self.get("model.model_name_or_path")
        if not name:
            return None
        folders = (Path(name), Path(self.document.name).parent / name)
        return next((folder for folder in folders if model_config.has_config(folder)), None)

    @functools.cached_property
    def text_config(self) -> Mapping[str, object]:
        return model_config.read_text_config(self.model_folder)


def problems(check: Callable, *arguments: object, edits: Iterable[Edit] = ()) -> Iterator[Problem]:
    """What a check of the features has to say: one of those that run at start, too."""
    try:
        check(*arguments)
    except ConfigError as error:
        yield Problem(error, tuple(edits))


def read_leniently(
    read: Callable[[Mapping], _Settings], plan: Mapping, path: str
) -> tuple[_Settings | None, list[ConfigError]]:
    """What `read(plan)` makes of the plan once its wrong keys are left out, or None; and what it said of each."""
    wrong: list[ConfigError] = []
    plan = dict(plan)
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is worth a warning is a rule of its own
                return read(plan), wrong
        except ConfigError as error:
            if any(error.path == other.path for other in wrong):
                return None, wrong
            wrong.append(error)
            plan.pop(error.path.removeprefix(f"{path}."), None)
