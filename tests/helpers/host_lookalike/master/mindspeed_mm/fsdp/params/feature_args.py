"""The `features` section of the yaml."""

from dataclasses import field

from mindspeed_mm.fsdp.params import feature_plans


class FeatureArguments(feature_plans.FeatureArguments):
    skip_moe_pad_tokens: bool = field(default=False)
