"""The `model` section of the yaml."""

from dataclasses import field

from mindspeed_mm.config.arguments.base_args import BaseArguments


class ModelArguments(BaseArguments):
    model_id: str | None = field(default=None)
    model_name_or_path: str | None = field(default=None)
