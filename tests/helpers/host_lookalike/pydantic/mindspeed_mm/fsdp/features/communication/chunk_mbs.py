"""The host's own micro-chunks, faults and all: only what is named is cut, by slices, and joined by `cat`."""

from functools import wraps

import torch
from mindspeed_mm import lookalike
from mindspeed_mm.fsdp.utils.str_match import module_name_match


def get_chunkmbs_modules(modules, plan):
    named = list(modules.named_modules())
    found = [(name, module) for pattern in plan for name, module in named if module_name_match(pattern, name)]
    if not found:
        raise RuntimeError(f"[ChunkMBS] No module named {plan}.")
    return found


def apply_chunkmbs_module(chunk_mbs_modules, chunkmbs_cfg):
    for _, module in chunk_mbs_modules:
        module.forward = chunk_mbs_forward(
            chunk_mbs=chunkmbs_cfg.chunk_mbs,
            batch_dim=chunkmbs_cfg.batch_dim,
            chunk_arg_indexs=chunkmbs_cfg.chunk_arg_indexs,
            chunk_kwarg_names=chunkmbs_cfg.chunk_kwarg_names,
        )(module.forward)


def chunk_mbs_forward(chunk_mbs=1, batch_dim=0, chunk_arg_indexs=None, chunk_kwarg_names=None):
    def decorator(forward):
        @wraps(forward)
        def wrapper(*args, **kwargs):
            lookalike.note("host's ChunkMBS")
            size, outputs = args[chunk_arg_indexs[0]].shape[batch_dim], []
            for start in range(0, size, chunk_mbs):
                place = (batch_dim, start, min(chunk_mbs, size - start))
                parts = [arg.narrow(*place) if i in chunk_arg_indexs else arg for i, arg in enumerate(args)]
                named = {key: arg.narrow(*place) if key in chunk_kwarg_names else arg for key, arg in kwargs.items()}
                outputs.append(forward(*parts, **named))
            return torch.cat(outputs, batch_dim)

        return wrapper

    return decorator
