"""What a model's `config.json` says of its MoE layers, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_text_config(folder: Any) -> Mapping[str, Any]:
    """The part on the language model; empty where the folder has no config.json, or one that is no mapping."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (TypeError, OSError, ValueError):
        return {}
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    return text if isinstance(text, dict) else {}


def num_experts(text_config: Mapping[str, Any]) -> int | None:
    return _first(text_config, "num_experts", "n_routed_experts")


def top_k(text_config: Mapping[str, Any]) -> int | None:
    """Experts a token."""
    return _first(text_config, "num_experts_per_tok", "moe_topk")


def _first(text_config: Mapping[str, Any], *keys: str) -> int | None:
    return next((text_config[key] for key in keys if isinstance(text_config.get(key), int)), None)
