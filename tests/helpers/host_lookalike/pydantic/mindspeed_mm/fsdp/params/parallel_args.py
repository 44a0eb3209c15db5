"""The `parallel` section of the yaml."""

import os
from dataclasses import field
from typing import Literal

from mindspeed_mm.config.arguments.base_args import BaseArguments


class FSDPPlanConfig(BaseArguments):
    apply_modules: list[str] = field(default_factory=list)
    hook_modules: list[str] | None = None


class EPPlanConfig(BaseArguments):
    apply_modules: list[str] = field(default_factory=list)
    use_npu_fused_ops: bool = True
    dispatcher: Literal["alltoall", "allgather", "mc2"] = "alltoall"
    apply_efsdp_modules: list[str] = field(default_factory=list)
    _gradient_divide_factor: float = None


class ParallelArguments(BaseArguments):
    fsdp_plan: FSDPPlanConfig = field(default_factory=FSDPPlanConfig)
    expert_parallel_size: int = field(default=1)
    expert_fully_shard_parallel_size: int = field(default=None)
    ep_plan: EPPlanConfig = field(default_factory=EPPlanConfig)

    def model_post_init(self, __context):
        self.local_rank = int(os.getenv("LOCAL_RANK"))
        self.global_rank = int(os.getenv("RANK"))
        self.world_size = int(os.getenv("WORLD_SIZE"))
        if self.expert_fully_shard_parallel_size is None:
            self.expert_fully_shard_parallel_size = self.world_size // self.expert_parallel_size
