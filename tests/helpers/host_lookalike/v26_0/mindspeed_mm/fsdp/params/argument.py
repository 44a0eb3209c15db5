"""The root of the yaml, and the function that reads it. There is no `features` section."""

import sys
from dataclasses import dataclass, field

import yaml
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.params.utils import allow_extra_fields, instantiate_dataclass


@allow_extra_fields
@dataclass
class Arguments:
    parallel: ParallelArguments = field(default_factory=ParallelArguments)
    model: ModelArguments = field(default_factory=ModelArguments)
    training: TrainingArguments = field(default_factory=TrainingArguments)


def parse_args(dataclass_type: Arguments):
    with open(sys.argv[1], encoding="utf-8") as file:
        args = instantiate_dataclass(dataclass_type, yaml.safe_load(file))
    args.training.compute_distributed_training(args.parallel)
    return args
