"""Recomputation of whole modules; the arguments' order and names are the host's."""

from mindspeed_mm.fsdp.utils.str_match import module_name_match
from torch.utils.checkpoint import checkpoint


def recompute_modules(model, plan):
    for _, module in get_recompute_modules(model, plan.apply_modules):
        module.forward = recompute_wrapper(module.forward, plan.use_reentrant)
    return model


def get_recompute_modules(modules, plan):
    named = list(modules.named_modules())
    found = [(name, module) for pattern in plan for name, module in named if module_name_match(pattern, name)]
    if not found:
        raise RuntimeError(f"[Recompute] No module named {plan}.")
    return found


def recompute_wrapper(function, use_reentrant):
    def wrapper(*args, **kwargs):
        return checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)

    return wrapper
