"""The `training` section of the yaml."""

from dataclasses import dataclass, field

from mindspeed_mm.config.arguments.base_args import BaseArguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments


@dataclass
class QuantizeConfig:
    recipe_name: str = None


class TrainingArguments(BaseArguments):
    lora: LoraArguments = field(default_factory=LoraArguments)
    lr: float = field(default=5e-5)
    seed: int = field(default=42)
    train_iters: int = field(default=10000)
    micro_batch_size: int = field(default=1)
    val_micro_batch_size: int | None = field(default=None)
    plugin: list[str] = field(default_factory=list)
    quantization_plan: QuantizeConfig = field(default_factory=QuantizeConfig)

    def compute_distributed_training(self, parallel_args):
        """The host works out its batch sizes here."""
