"""The `features` section of the yaml, with op replay and a second kind of activation offload."""

from dataclasses import field
from typing import Literal

from mindspeed_mm.config.arguments.base_args import BaseArguments
from mindspeed_mm.fsdp.params import feature_plans


class OpReplayScopeConfig(BaseArguments):
    name: str | None = field(default=None)
    apply_modules: list[str] = field(default_factory=list)
    save_rng: bool = field(default=True)
    cache_ops: list[str] | None = field(default=None)


class RecomputePlanConfig(BaseArguments):
    apply_modules: list[str] = field(default_factory=list)
    use_reentrant: bool = False
    flatten_inputs: bool = False
    op_replay_scopes: list[OpReplayScopeConfig] = field(default_factory=list)


class ActivationOffloadPlanConfig(BaseArguments):
    apply_modules: list[str] | None = field(default=None)
    impl: Literal["legacy", "stash"] = field(default="legacy")


class FeatureArguments(feature_plans.FeatureArguments):
    recompute_plan: RecomputePlanConfig = field(default_factory=RecomputePlanConfig)
    activation_offload_plan: ActivationOffloadPlanConfig = field(default_factory=ActivationOffloadPlanConfig)
    skip_moe_pad_tokens: bool = field(default=False)
