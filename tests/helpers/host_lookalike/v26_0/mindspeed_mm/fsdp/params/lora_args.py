"""The `training.lora` section of the yaml."""

from dataclasses import dataclass, field


@dataclass
class LoraArguments:
    enable: bool = field(default=False)
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj"])
