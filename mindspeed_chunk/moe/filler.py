"""Work that does not depend on the routed tokens, computed during the first dispatch.

A model's block defines the work (`Filler`), and the dispatcher runs it at the right moment (`run_filler`):

    filler = Filler(lambda: shared_expert(x))
    with filler:
        routed = experts(x, index, weights)
    return routed + filler.result()

With a dispatcher that does not use fillers, `result()` computes it. Autograd records the filler between the two nodes
of the layer call, so its backward runs while the layer's last rows are sent back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token

import torch

_current: ContextVar[Filler | None] = ContextVar("filler", default=None)


class Filler:
    """Work that is computed once: in a layer call inside the `with` block, or else by `result()`."""

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
        """Compute, unless this has been done. True if it computed."""
        if self._compute is None:
            return False
        self._result = self._compute()
        self._compute = None
        return True

    def result(self) -> torch.Tensor:
        self.run()
        return self._result


def run_filler() -> bool:
    """Compute the filler of the block around this layer call, if any, and not yet computed. True if it computed."""
    filler = _current.get()
    return filler is not None and filler.run()
