"""Where the package at hand comes from, and which other copies of it are on Python's path.

Python takes a part from where it finds it first: with a copy before the installed one, or beside an editable install,
that need not be the same folder for every part.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

NAME = "mindspeed_chunk"


def core() -> str:
    """The folder of everything but the patches, links resolved."""
    return os.path.dirname(os.path.realpath(__file__))


def patches() -> str | None:
    """The folder of the patches, links resolved; None if there are none."""
    try:
        spec = importlib.util.find_spec(f"{NAME}.patches")
    except ValueError:  # imported, and without a spec
        return None
    return None if spec is None or spec.origin is None else os.path.dirname(os.path.realpath(spec.origin))


def found() -> list[str]:
    """The folders of all copies, as Python would find them, links resolved; the first is the one that is imported."""
    specs = [PathFinder.find_spec(NAME, [entry]) for entry in sys.path]
    # an editable install has a finder of its own
    others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not PathFinder)
    specs += [find(NAME, None, None) for find in others if find is not None]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(os.path.dirname(os.path.realpath(origin)) for origin in origins))


def problems() -> list[str]:
    """One line for parts that do not belong together, or else for further copies; none in a sound environment."""
    here, seams = core(), patches()
    # in a checkout they stand beside the package
    if seams is not None and seams not in (os.path.join(folder, "patches") for folder in (here, os.path.dirname(here))):
        return [f"two copies are mixed: the core is {here}, its patches are {seams}; uninstall one of them"]
    hidden = ", ".join(folder for folder in found() if folder != here)
    return [f"there are several copies: {here} is used, not used: {hidden}; remove what is not meant"] if hidden else []
