"""Calls back right after the host's modules are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

Then = Callable[[str, ModuleType], None]


class PostImport:
    """The first finder in `sys.meta_path`. Calls `then` with name and module after an import of one of `names`."""

    def __init__(self, names: Collection[str], then: Then) -> None:
        self._names, self._then = names, then

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in self._names:
            return None
        others = (find for finder in sys.meta_path if finder is not self and (find := _find_spec_of(finder)))
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._then)
        return spec


def _find_spec_of(finder: object) -> Any:
    return getattr(finder, "find_spec", None)  # an old kind of finder has none


class _Loader:
    """Wraps a module's own loader for one import. The module gets its own loader back before its code runs."""

    def __init__(self, loader: Any, then: Then) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy has no attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        name = module.__spec__.name
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(name, module)
