"""Applies the features that stand in the `model` section here, when the model has been parallelised."""

from mindspeed_mm.fsdp.utils.str_match import module_name_match

from ..features.memory.async_offload import async_offload_modules, get_offload_modules


class FeaturesApplier:
    def __init__(self, model_config):
        self.config = model_config

    def get_needed_modules(self, modules, plan):
        named = list(modules.named_modules())
        found = [(name, module) for pattern in plan for name, module in named if module_name_match(pattern, name)]
        return list(dict.fromkeys(found))

    def apply_activation_offload_modules(self, model):
        plan = getattr(self.config, "activation_offload_plan", None)
        if plan is not None:
            async_offload_modules(get_offload_modules(model, plan.apply_modules))

    def __call__(self, model):
        self.apply_activation_offload_modules(model=model)
