"""A patch is a record of one seam of the host. It is checked before anything changes, and undone without a trace.

Nothing heavy is imported here or by any patch at its top: the hooks are set while torch itself is being imported.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mindspeed_chunk.log import say

WAITING = "waiting"  # its module has not been imported
READY = "ready"  # it fits, and is applied when a run needs it
APPLIED = "applied"
NOT_NEEDED = "not needed"
DRIFTED = "drifted"

Undo = Callable[[], None]


class NotNeeded(Exception):
    """The host already has what the patch would add; the message says what."""


class Drifted(Exception):
    """The host is not what the patch was written for; the message says what was found."""


@dataclass
class Patch:
    """One seam.

    Attributes:
        name: short, for logs and `doctor`.
        module: the host's module whose import applies the patch.
        target: what is changed in it.
        hosts: the versions it was made for.
        expects: the signature or shape it relies on, in words.
        why, until: why it is needed, and when it can be removed.
        apply: changes the module and returns a function that undoes it; raises `NotNeeded` or `Drifted` before any
            change.
        enabled_by: the setting of a run that replaces something; empty for a patch that replaces it on import.
        state, detail: the result.
    """

    name: str
    module: str
    target: str
    hosts: str
    expects: str
    why: str
    until: str
    apply: Callable[[ModuleType], Undo]
    enabled_by: str = ""
    state: str = WAITING
    detail: str = ""
    undo: Undo | None = None

    def on_import(self, module: ModuleType) -> None:
        """Check and apply; once. Never raises: an import of the host must not fail because of a plugin."""
        if self.state != WAITING:
            return
        try:
            self.undo = self.apply(module)
            self.state = APPLIED
        except NotNeeded as reason:
            self.state, self.detail = NOT_NEEDED, str(reason)
        except Exception as reason:  # a changed host may raise anything
            detail = str(reason) if isinstance(reason, Drifted) else f"{type(reason).__name__}: {reason}"
            self.state, self.detail = DRIFTED, detail
            say(logging.WARNING, f"{self}; features that need it are not available")

    def remove(self) -> None:
        if self.undo is not None:
            self.undo()
        self.state, self.detail, self.undo = WAITING, "", None

    def __str__(self) -> str:
        text = f"{self.name} ({self.module}.{self.target}): {self.state}"
        if self.state == DRIFTED:
            return f"{text}: expected {self.expects}, found {self.detail}"
        return f"{text}: {self.detail}" if self.detail else text


def signature_of(function: Callable) -> str:
    """Its parameters' names, as records and messages show them."""
    return f"({', '.join(inspect.signature(function).parameters)})"


class Seam:
    """A function of the host, and our function that replaces it when a patch or a run needs it.

    Attributes:
        owner: the module or class that has it; None until it is found.
        replaced: our function is in its place.
    """

    def __init__(self, name: str, importers: tuple[str, ...] = ()) -> None:
        """`importers`: modules that may have bound it by `from ... import` already."""
        self.name, self._importers = name, importers
        self.owner: Any = None
        self._original: Any = None
        self._ours: Any = None

    @property
    def replaced(self) -> bool:
        return self._ours is not None

    def bind(self, owner: object) -> Undo:
        """Remember where it is; change nothing yet."""
        self.forget()
        self.owner = owner
        return self.forget

    def replace(self, make: Callable[[Callable], Callable]) -> None:
        """Put `make(the host's own)` there. A function of ours that is already there is removed first."""
        self.restore()
        original = getattr(self.owner, self.name)
        ours = make(original)
        self._original, self._ours = original, ours
        self._put(original, ours)

    def restore(self) -> None:
        if self.replaced:
            self._put(self._ours, self._original)
            self._original = self._ours = None

    def forget(self) -> None:
        self.restore()
        self.owner = None

    def _put(self, old: Callable, new: Callable) -> None:
        setattr(self.owner, self.name, new)
        for module in filter(None, map(sys.modules.get, self._importers)):
            # if other code has wrapped it there, the wrapper stays
            if getattr(module, self.name, None) is old:
                setattr(module, self.name, new)
