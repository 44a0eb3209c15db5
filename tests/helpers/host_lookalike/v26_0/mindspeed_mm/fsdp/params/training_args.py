"""The `training` section of the yaml."""

from dataclasses import dataclass, field

from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.utils import allow_extra_fields


@allow_extra_fields
@dataclass
class TrainingArguments:
    lora: LoraArguments = field(default_factory=LoraArguments)
    lr: float = field(default=5e-5)
    seed: int = field(default=42)
    train_iters: int = field(default=10000)
    micro_batch_size: int = field(default=1)
    plugin: list[str] = field(default_factory=list)

    def compute_distributed_training(self, parallel_args):
        """The host works out its batch sizes here."""
