"""What a model's `config.json` says of its MoE layers, read without transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_chunk.wording import shortened, shown

MAX_BYTES = 1024 * 1024
MAX_LAYERS = 1000  # which all are built to learn their names
_COUNT = re.compile(r"layers$|^n_layer$|depths?$|^layer_types$")


class BadConfig(ValueError):
    """One line on what is wrong with the `config.json` of a folder."""


def has_config(folder: Path) -> bool:
    """Whether there is one, which may be unreadable."""
    try:
        return (folder / "config.json").is_file()
    except PermissionError:
        return True
    except OSError:  # no name of a file, as one of 5000 characters
        return False


def read(folder: Path) -> dict[str, Any]:
    """The content of the folder's `config.json`. Raises BadConfig, also where it has more than `MAX_LAYERS` layers."""
    if not has_config(folder):
        raise BadConfig("has no config.json")
    return read_file(folder / "config.json")


def read_file(path: Path) -> dict[str, Any]:
    """The content of a `config.json`, whatever the file's name. Raises BadConfig as `read` does."""
    its = f"its {shortened(path.name)}"
    try:
        with path.open("rb") as file:
            found = file.read(MAX_BYTES + 1)
        if len(found) > MAX_BYTES:
            raise BadConfig(f"{its} is larger than {MAX_BYTES // 1024} KiB")
        config = json.loads(found.decode("utf-8"))
    except OSError as error:
        raise BadConfig(f"{its} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise BadConfig(f"{its} is not valid: too many brackets inside of one another") from None
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
            raise BadConfig(f"its {key} is {shown(number)}, and at most {MAX_LAYERS} layers are taken")


def read_text_config(folder: Any) -> Mapping[str, Any]:
    """The part on the language model; empty where the folder has no config.json, or one that cannot be used."""
    try:
        config = read(Path(folder))
    except (TypeError, BadConfig):  # what is no name of a folder
        return {}
    text = config.get("text_config", config)
    return text if isinstance(text, dict) else {}


def num_experts(text_config: Mapping[str, Any]) -> int | None:
    return _first(text_config, "num_experts", "n_routed_experts")


def top_k(text_config: Mapping[str, Any]) -> int | None:
    """Experts a token."""
    return _first(text_config, "num_experts_per_tok", "moe_topk")


def _first(text_config: Mapping[str, Any], *keys: str) -> int | None:
    found = (text_config.get(key) for key in keys)
    return next((each for each in found if isinstance(each, int) and not isinstance(each, bool) and each > 0), None)
