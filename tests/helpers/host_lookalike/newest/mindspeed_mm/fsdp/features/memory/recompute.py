"""Recomputation of whole modules, which may hand its checkpoints a `context_fn` and flat arguments."""

import functools

from mindspeed_mm.fsdp.utils.str_match import module_name_match
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .op_replay import build_op_replay_context_fn


def recompute_modules(model, plan, op_cache=None):
    context_fn = build_op_replay_context_fn(model, plan.op_replay_scopes, plan.use_reentrant, op_cache)
    for _, module in get_recompute_modules(model, plan.apply_modules):
        module.forward = recompute_wrapper(module.forward, plan.use_reentrant, context_fn, plan.flatten_inputs, module)
    return model


def get_recompute_modules(modules, plan):
    named = list(modules.named_modules())
    found = [(name, module) for pattern in plan for name, module in named if module_name_match(pattern, name)]
    if not found:
        raise RuntimeError(f"[Recompute] No module named {plan}.")
    return found


def recompute_wrapper(function, use_reentrant, context_fn=None, flatten_inputs=False, module=None):
    def wrapper(*args, **kwargs):
        if use_reentrant:
            return checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=use_reentrant)
        contexts = {} if context_fn is None else {"context_fn": context_fn}
        if not flatten_inputs:
            return checkpoint(function, *args, use_reentrant=use_reentrant, **contexts, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))

        def flat(*leaves):
            args, kwargs = tree_unflatten(leaves, spec)
            return function(*args, **kwargs)

        return checkpoint(flat, *leaves, use_reentrant=use_reentrant, **contexts)

    return wrapper
