"""Work that has nothing to do with the routed tokens, computed while the first of them travel.

A model's block says what it is (`Filler`), the dispatcher says when (`run_filler`):

    filler = Filler(lambda: shared_expert(x))
    with filler:
        routed = experts(x, index, weights)
    return routed + filler.result()

A dispatcher that knows nothing of it changes nothing: `result()` then computes it. What autograd records of the filler
stands between the two nodes of the layer call, so its backward runs while the layer's last rows travel back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token

import torch

_current: ContextVar[Filler | None] = ContextVar("filler", default=None)


class Filler:
    """Something to compute once, in the layer call made while this is entered or else when the result is asked for."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._result: torch.Tensor
        self._entered: Token[Filler | None]

    def __enter__(self) -> Filler:
        self._entered = _current.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _current.reset(self._entered)

    def run(self) -> bool:
        """Compute, unless that is done. True if it was not."""
        if self._compute is None:
            return False
        self._result = self._compute()
        self._compute = None
        return True

    def result(self) -> torch.Tensor:
        self.run()
        return self._result


def run_filler() -> bool:
    """Compute what the block around this layer call has to offer, if it has not been computed. True if it was."""
    filler = _current.get()
    return filler is not None and filler.run()
