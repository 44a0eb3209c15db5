"""The `parallel` section of the yaml, with a chunkmoe of the host's own."""

import logging
import os
from dataclasses import field
from typing import Literal

from mindspeed_mm.config.arguments.base_args import BaseArguments

logger = logging.getLogger(__name__)


class FSDPPlanConfig(BaseArguments):
    apply_modules: list[str] = field(default_factory=list)
    hook_modules: list[str] | None = None


class EPPlanConfig(BaseArguments):
    apply_modules: list[str] = field(default_factory=list)
    use_npu_fused_ops: bool = True
    dispatcher: Literal["alltoall", "allgather", "mc2", "chunkmoe"] = "alltoall"
    apply_efsdp_modules: list[str] = field(default_factory=list)
    _gradient_divide_factor: float = None
    moe_chunk_size: int = field(default=0)
    moe_num_chunks: int = field(default=0)
    chunk_moe_recompute: bool = field(default=False)

    def model_post_init(self, __context):
        if self.moe_chunk_size > 0 and self.moe_num_chunks > 0:
            logger.warning("moe_chunk_size and moe_num_chunks are both set; moe_num_chunks takes precedence")


class ParallelArguments(BaseArguments):
    fsdp_plan: FSDPPlanConfig = field(default_factory=FSDPPlanConfig)
    expert_parallel_size: int = field(default=1)
    expert_fully_shard_parallel_size: int = field(default=None)
    expert_data_parallel_size: int = field(default=1)
    ep_plan: EPPlanConfig = field(default_factory=EPPlanConfig)

    def model_post_init(self, __context):
        self.world_size = int(os.getenv("WORLD_SIZE"))
        if self.expert_fully_shard_parallel_size is None:
            self.expert_fully_shard_parallel_size = self.world_size // self.expert_parallel_size
