"""The `features` section of the yaml."""

from dataclasses import field

from mindspeed_mm.config.arguments.base_args import BaseArguments


class FeatureArguments(BaseArguments):
    enable_ep_balance: bool = field(default=False)
    skip_moe_pad_tokens: bool = field(default=False)
