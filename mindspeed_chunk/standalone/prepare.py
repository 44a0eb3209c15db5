"""The work of a rank between reading the yaml and joining the process group: model, data, and all their checks."""

from dataclasses import dataclass
from typing import TextIO

import torch

from mindspeed_chunk import ops
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.moe.shared_expert import overlap_shared_expert
from mindspeed_chunk.standalone.config import Config
from mindspeed_chunk.standalone.data import VOCABULARY, PackedText
from mindspeed_chunk.standalone.model import Modules, build_model, find_modules, read_model_config
from mindspeed_chunk.standalone.parallel import DEVICE


@dataclass(frozen=True)
class Prepared:
    """A rank's model, the same on every rank, with its modules and data."""

    config: Config
    model: torch.nn.Module
    modules: Modules
    data: PackedText


def prepare(config: Config) -> Prepared:
    """Build the model and the data of a Config. Raises ConfigError, the same on every rank."""
    if config.ep.dispatcher == "chunkmoe":
        try:
            ops.resolve(config.chunk_moe.chunk_moe_backend, torch.device(DEVICE))
        except ValueError as error:
            raise ConfigError(f"parallel.ep_plan.{error}") from None
    model_config = read_model_config(config, VOCABULARY)
    data = PackedText(config.sequence_length, config.training.seed)
    model = build_model(config, model_config)
    modules = find_modules(model, config)
    if config.ep.dispatcher == "chunkmoe" and config.chunk_moe.chunk_moe_overlap_shared_expert:
        overlap_shared_expert(model)
    return Prepared(config, model, modules, data)


def open_metrics(config: Config) -> TextIO | None:
    """The metrics file, open for writing, or None. Its content is not removed yet. Raises ConfigError."""
    path = config.metrics_path
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except (OSError, ValueError) as error:  # a name may have characters that no file name can have
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError.about("standalone.metrics_path", str(path), reason, "give another file") from None
