"""Applies the features to a model; binds what it calls when it is imported."""

from ..features.communication.chunk_mbs import apply_chunkmbs_module, get_chunkmbs_modules
from ..features.memory.async_offload import async_offload_modules, get_offload_modules
from ..features.memory.recompute import recompute_modules


class FeaturesApplier:
    def __init__(self, feature_config):
        self.config = feature_config

    def apply_recompute_models(self, model):
        if getattr(self.config, "recompute", False):
            recompute_modules(model, self.config.recompute_plan)

    def apply_activation_offload_modules(self, model):
        if self.config.enable_activation_offload:
            async_offload_modules(get_offload_modules(model, self.config.activation_offload_plan.apply_modules))

    def apply_chunk_mbs(self, model):
        if self.config.enable_chunk_mbs:
            found = get_chunkmbs_modules(model, self.config.chunkmbs_plan.apply_modules)
            apply_chunkmbs_module(chunk_mbs_modules=found, chunkmbs_cfg=self.config.chunkmbs_plan)

    def pre_fully_shard_apply(self, model):
        self.apply_recompute_models(model=model)
        self.apply_activation_offload_modules(model=model)
        self.apply_chunk_mbs(model=model)
