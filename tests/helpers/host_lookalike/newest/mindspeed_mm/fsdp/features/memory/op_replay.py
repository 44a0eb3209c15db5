"""Results of single operations inside of a checkpoint are put away, and taken back where it is recomputed.

Both by the order of calls alone: a recompute that calls other operations in such a region gets wrong results.
"""

import functools

import torch
from mindspeed_mm import lookalike
from mindspeed_mm.fsdp.utils.str_match import module_name_match
from torch.utils._python_dispatch import TorchDispatchMode

DEFAULT_CACHE_OPS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default"})


class OpReplayScope:
    def __init__(self, cache_ops=None, save_rng=True, name=None):
        names = DEFAULT_CACHE_OPS if cache_ops is None else cache_ops
        self.cache_ops = {functools.reduce(getattr, each.split("."), torch.ops) for each in names}


class _Session:
    """One checkpoint call: for each operation the handles of its results, in the order of its calls."""

    def __init__(self, regions, cache):
        self.regions, self.cache, self.handles = regions, cache, {}

    def covers(self, function):
        return bool(self.regions) and function in self.regions[-1].cache_ops


class OpReplayCachingMode(TorchDispatchMode):
    def __init__(self, session):
        super().__init__()
        self.session = session

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if self.session.covers(func):
            self.session.handles.setdefault(func, []).append(self.session.cache.put(out.detach()))
        return out


class OpReplayReplayingMode(OpReplayCachingMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        handles = self.session.handles.get(func)
        if not self.session.covers(func) or not handles:
            return func(*args, **kwargs or {})
        lookalike.note("replayed")
        return self.session.cache.pop(handles.pop(0))

    def __exit__(self, *args):
        super().__exit__(*args)
        for handles in self.session.handles.values():
            while handles:
                self.session.cache.pop(handles.pop())


def build_op_replay_context_fn(model, scope_configs, use_reentrant, op_cache=None):
    """The `context_fn` of all checkpoints; None where there is nothing to replay."""
    if not scope_configs or use_reentrant:
        return None
    regions = []

    def inside(scope, forward):
        @functools.wraps(forward)
        def wrapper(*args, **kwargs):
            regions.append(scope)
            try:
                return forward(*args, **kwargs)
            finally:
                regions.pop()

        return wrapper

    for config in scope_configs:
        scope = OpReplayScope(config.cache_ops, config.save_rng, config.name)
        for name, module in list(model.named_modules()):
            if any(module_name_match(pattern, name) for pattern in config.apply_modules):
                module.forward = inside(scope, module.forward)

    def contexts():
        session = _Session(regions, op_cache)
        return OpReplayCachingMode(session), OpReplayReplayingMode(session)

    return contexts
