"""The `training.lora` section of the yaml."""

from dataclasses import field

from mindspeed_mm.config.arguments.base_args import BaseArguments


class LoraArguments(BaseArguments):
    enable: bool = field(default=False)
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj"])
