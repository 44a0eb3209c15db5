"""Applies the plans to a model; binds `expert_parallelize_modules` when it is imported."""

from mindspeed_mm.fsdp.distributed.parallel_state import get_ep_device_mesh

from .expert_parallel.expert_parallel import expert_parallelize_modules


class ParallelApplier:
    def __init__(self, parallel_config, training_config):
        self.config = parallel_config
        self.training_config = training_config

    def apply_ep_modules(self, model):
        if self.config.expert_parallel_size > 1 and self.config.ep_plan.apply_modules:
            model = expert_parallelize_modules(model, get_ep_device_mesh(), self.config.ep_plan)
        return model

    def __call__(self, model):
        return self.apply_ep_modules(model)
