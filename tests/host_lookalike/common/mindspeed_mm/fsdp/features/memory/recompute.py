"""Recomputation of whole modules; the arguments' order and names are the host's."""

from torch.utils.checkpoint import checkpoint


def recompute_wrapper(function, use_reentrant):
    def wrapper(*args, **kwargs):
        return checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)

    return wrapper
