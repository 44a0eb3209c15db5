"""The root of the yaml."""

from dataclasses import field

from mindspeed_mm.config.arguments.base_args import BaseArguments
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments


class Arguments(BaseArguments):
    parallel: ParallelArguments = field(default_factory=ParallelArguments)
    model: ModelArguments = field(default_factory=ModelArguments)
    training: TrainingArguments = field(default_factory=TrainingArguments)
    features: FeatureArguments = field(default_factory=FeatureArguments)

    def model_post_init(self, __context):
        self.training.compute_distributed_training(self.parallel)
