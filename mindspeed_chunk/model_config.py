"""The MoE layers of a model, from its `config.json`, read without transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_chunk.wording import shortened, shown

MAX_BYTES = 1024 * 1024
MAX_LAYERS = 1000  # all of them are built to get their names
_COUNT = re.compile(r"layers$|^n_layer$|depths?$|^layer_types$")


class BadConfig(ValueError):
    """The fault in the `config.json` of a folder, in one line."""


def has_config(folder: Path) -> bool:
    """Whether there is one; it may be unreadable."""
    try:
        return (folder / "config.json").is_file()
    except PermissionError:
        return True
    except OSError:  # not a possible file name, such as one of 5000 characters
        return False


def read(folder: Path) -> dict[str, Any]:
    """The content of the folder's `config.json`. Raises BadConfig, also for more than `MAX_LAYERS` layers."""
    if not has_config(folder):
        raise BadConfig("has no config.json")
    return read_file(folder / "config.json")


def read_file(path: Path) -> dict[str, Any]:
    """The content of a `config.json` with any file name. Raises BadConfig as `read` does."""
    its = f"its {shortened(path.name)}"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise BadConfig(f"{its} is larger than {MAX_BYTES // 1024} KiB")
        config = json.loads(data.decode("utf-8"))
    except OSError as error:
        raise BadConfig(f"{its} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise BadConfig(f"{its} is not valid: it has too many nested brackets") from None
    except ValueError as error:
        if isinstance(error, BadConfig):
            raise
        raise BadConfig(f"{its} is not valid: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise BadConfig(f"{its} is not valid: it must be a mapping")
    _check_layers(config)
    return config


def _check_layers(config: Mapping[str, Any]) -> None:
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += ((key, each) for each in value)
        number = len(value) if isinstance(value, list) else value
        if _COUNT.search(key) and isinstance(number, int) and number > MAX_LAYERS:
            raise BadConfig(f"its {key} is {shown(number)}, but must be at most {MAX_LAYERS}")


def read_text_config(folder: Any) -> Mapping[str, Any]:
    """The part for the language model; empty if the folder has no config.json, or one that cannot be used."""
    try:
        config = read(Path(folder))
    except (TypeError, BadConfig):  # not a possible folder name
        return {}
    text = config.get("text_config", config)
    return text if isinstance(text, dict) else {}


def num_experts(text_config: Mapping[str, Any]) -> int | None:
    return _first(text_config, "num_experts", "n_routed_experts")


def top_k(text_config: Mapping[str, Any]) -> int | None:
    """Experts per token."""
    return _first(text_config, "num_experts_per_tok", "moe_topk")


def _first(text_config: Mapping[str, Any], *keys: str) -> int | None:
    values = (text_config.get(key) for key in keys)
    return next((each for each in values if isinstance(each, int) and not isinstance(each, bool) and each > 0), None)
