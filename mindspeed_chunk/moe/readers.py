"""Finds out who reads a tensor: whether later operations may keep some of its values for the backward.

It sees operations that go through torch's dispatcher. It does not see a hand-written kernel, or a Function that saves
its input and makes a view of it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose derivatives do not need the input values.
_KEEP_NOTHING = frozenset(
    """
    add add_ sub sub_ rsub neg clone copy copy_ to _to_copy detach alias lift_fresh
    view _unsafe_view reshape _reshape_alias as_strided expand squeeze unsqueeze transpose t permute
    slice select narrow split split_with_sizes chunk unbind cat stack
    empty_like zeros_like ones_like new_empty new_zeros
    """.split()
)


class Readers(TorchDispatchMode):
    """Follows tensors through the operations that use them while this is active.

    Attributes:
        read: the labels of tensors that were an input of an operation that may keep values; every operation counts,
            except those that are known to keep none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        self._all: set[int] = set()
        self._labels: weakref.WeakKeyDictionary[torch.UntypedStorage, set[int]] = weakref.WeakKeyDictionary()

    def follow(self, tensor: torch.Tensor, label: int) -> None:
        self._all.add(label)
        self._labels.setdefault(tensor.untyped_storage(), set()).add(label)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        labels = set().union(*map(self._of, leaves))
        if any(isinstance(leaf, torch.Tensor) and not _has_storage(leaf) for leaf in leaves):
            self.read |= self._all  # a subclass (DTensor) may wrap any of them, and its inner operations are not seen
        result = func(*args, **(kwargs or {}))
        if labels:
            name = func._overloadpacket.__name__
            where = name == "where" and len(args) == 3 and not self._of(args[0])
            if func.namespace != "aten" or not (name in _KEEP_NOTHING or where):
                self.read |= labels
            written = [args[0]] if name.endswith("_") else []
            for leaf in (*tree_leaves(result), *written):
                if _has_storage(leaf):
                    for label in labels:
                        self.follow(leaf, label)
        return result

    def _of(self, leaf: Any) -> set[int]:
        return self._labels.get(leaf.untyped_storage(), set()) if _has_storage(leaf) else set()


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and type(leaf) in (torch.Tensor, torch.nn.Parameter)
