"""Everything that a block saves is put away, but for what is inside of a checkpoint."""

import functools

import torch
from mindspeed_mm.fsdp.utils.str_match import module_name_match
from torch.autograd.graph import saved_tensors_hooks


def apply_act_stash_modules(model, apply_modules, cache):
    def pack(tensor):
        return tensor if isinstance(tensor, torch.nn.Parameter) else (cache.put(tensor.detach()),)

    def unpack(kept):
        return cache.pop(*kept) if isinstance(kept, tuple) else kept

    def stashing(forward):
        @functools.wraps(forward)
        def wrapper(*args, **kwargs):
            with saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return wrapper

    for name, module in list(model.named_modules()):
        if any(module_name_match(pattern, name) for pattern in apply_modules):
            module.forward = stashing(module.forward)
    return model
