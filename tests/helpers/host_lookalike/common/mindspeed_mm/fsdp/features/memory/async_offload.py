"""A block's input leaves, and comes back: as the host does it, by the place of its bytes, and here without streams."""

from functools import wraps

from mindspeed_mm import lookalike
from mindspeed_mm.fsdp.utils.str_match import module_name_match
from torch.autograd.graph import saved_tensors_hooks


def get_offload_modules(modules, plan):
    named = list(modules.named_modules())
    found = [(name, module) for pattern in plan for name, module in named if module_name_match(pattern, name)]
    return [(name, module, place, len(found)) for place, (name, module) in enumerate(found)]


def async_offload_modules(modules):
    for name, module, place, depth in modules:
        module.forward = with_async_save_on_cpu(name, place, depth)(module.forward)


def with_async_save_on_cpu(module_name, layer_idx, depth, prefetch=True, hidden_states_idx=0):
    def decorator(forward):
        @wraps(forward)
        def wrapper(*args, **kwargs):
            hidden_states = args[hidden_states_idx]

            def pack(tensor):
                if tensor.data_ptr() != hidden_states.data_ptr() or layer_idx == depth - 1:
                    return tensor
                lookalike.offloaded.append(len(hidden_states))
                return (tensor.clone(),)

            with saved_tensors_hooks(pack, lambda kept: kept[0] if isinstance(kept, tuple) else kept):
                return forward(*args, **kwargs)

        return wrapper

    return decorator
