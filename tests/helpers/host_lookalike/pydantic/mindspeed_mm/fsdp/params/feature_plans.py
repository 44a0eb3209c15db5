"""What the `features` sections of all versions with pydantic have in common; the host has it in feature_args."""

from dataclasses import field

from mindspeed_mm.config.arguments.base_args import BaseArguments


class RecomputePlanConfig(BaseArguments):
    apply_modules: list[str] = field(default_factory=list)
    use_reentrant: bool = False


class LossArguments(BaseArguments):
    router_aux_loss_coef: float = field(default=0.0)
    router_aux_loss_offload: bool = field(default=False)


class ActivationOffloadPlanConfig(BaseArguments):
    apply_modules: list[str] = field(default=None)


class ChunkMbsPlanConfig(BaseArguments):
    apply_modules: list[str] = field(default=None)
    chunk_mbs: int = field(default=1)
    batch_dim: int = field(default=0)
    chunk_arg_indexs: list[int] = field(default=[0])
    chunk_kwarg_names: list[str] = field(default=[])


class FeatureArguments(BaseArguments):
    recompute_plan: RecomputePlanConfig = field(default_factory=RecomputePlanConfig)
    loss_cfg: LossArguments = field(default_factory=LossArguments)
    enable_activation_offload: bool = field(default=False)
    activation_offload_plan: ActivationOffloadPlanConfig = field(default_factory=ActivationOffloadPlanConfig)
    enable_chunk_mbs: bool = field(default=False)
    chunkmbs_plan: ChunkMbsPlanConfig = field(default_factory=ChunkMbsPlanConfig)
    enable_ep_balance: bool = field(default=False)
