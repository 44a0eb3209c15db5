"""Applies the features to a model, in this order; two of them share what puts tensors away."""

from ..features.communication.chunk_mbs import apply_chunkmbs_module, get_chunkmbs_modules
from ..features.memory.act_stash import apply_act_stash_modules
from ..features.memory.async_offload import async_offload_modules, get_offload_modules
from ..features.memory.recompute import recompute_modules
from ..features.memory.swap_manager import SwapManager


class FeaturesApplier:
    def __init__(self, feature_config):
        self.config = feature_config
        self.swap_manager = None

    def _cache(self, tenant):
        self.swap_manager = self.swap_manager or SwapManager(getattr(self.config, "swap_plan", None))
        return self.swap_manager.get_cache(tenant)

    def apply_recompute_models(self, model):
        if getattr(self.config, "recompute", False):
            plan = self.config.recompute_plan
            recompute_modules(model, plan, op_cache=self._cache("op_replay") if plan.op_replay_scopes else None)

    def apply_activation_offload_modules(self, model):
        plan = self.config.activation_offload_plan
        if not self.config.enable_activation_offload:
            return
        if plan.impl == "stash":
            apply_act_stash_modules(model, plan.apply_modules, self._cache("actstash"))
        else:
            async_offload_modules(get_offload_modules(model, plan.apply_modules))

    def apply_chunk_mbs(self, model):
        if self.config.enable_chunk_mbs:
            found = get_chunkmbs_modules(model, self.config.chunkmbs_plan.apply_modules)
            apply_chunkmbs_module(chunk_mbs_modules=found, chunkmbs_cfg=self.config.chunkmbs_plan)

    def pre_fully_shard_apply(self, model):
        self.apply_recompute_models(model=model)
        self.apply_activation_offload_modules(model=model)
        self.apply_chunk_mbs(model=model)
