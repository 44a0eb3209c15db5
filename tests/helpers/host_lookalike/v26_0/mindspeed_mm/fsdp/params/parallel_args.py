"""The `parallel` section of the yaml. An `ep_plan` takes any dispatcher, and no unknown key."""

import os
from dataclasses import dataclass, field
from typing import Literal

from mindspeed_mm.fsdp.params.utils import allow_extra_fields


@dataclass
class FSDPPlanConfig:
    apply_modules: list[str] = field(default_factory=list)
    hook_modules: list[str] | None = None


@dataclass
class EPPlanConfig:
    apply_modules: list[str] = field(default_factory=list)
    dispatcher: Literal["eager", "fused", "mc2"] = "fused"
    apply_efsdp_modules: list[str] = field(default_factory=list)
    _gradient_divide_factor: float = None


@dataclass
class RecomputePlanConfig:
    apply_modules: list[str] = field(default_factory=list)
    use_reentrant: bool = False


@allow_extra_fields
@dataclass
class ParallelArguments:
    fsdp_plan: FSDPPlanConfig = field(default_factory=FSDPPlanConfig)
    expert_parallel_size: int = field(default=1)
    expert_fully_shard_parallel_size: int = field(default=None)
    ep_plan: EPPlanConfig = field(default_factory=EPPlanConfig)
    recompute: bool = field(default=False)
    recompute_plan: RecomputePlanConfig = field(default_factory=RecomputePlanConfig)

    def __post_init__(self):
        self.local_rank = int(os.getenv("LOCAL_RANK"))
        self.global_rank = int(os.getenv("RANK"))
        self.world_size = int(os.getenv("WORLD_SIZE"))
        if self.expert_fully_shard_parallel_size is None:
            self.expert_fully_shard_parallel_size = self.world_size // self.expert_parallel_size
