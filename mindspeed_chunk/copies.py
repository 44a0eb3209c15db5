"""The folder of the imported package, and other copies of it on Python's path.

Python imports each part from the first folder that has it. If there is another copy before the installed one, or in
addition to an editable install, parts may come from different folders.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

NAME = "mindspeed_chunk"


def core() -> str:
    """The folder of everything except the patches, links resolved."""
    return os.path.dirname(os.path.realpath(__file__))


def patches() -> str | None:
    """The folder of the patches, links resolved; None if there are none."""
    try:
        spec = importlib.util.find_spec(f"{NAME}.patches")
    except ValueError:  # imported without a spec
        return None
    return None if spec is None or spec.origin is None else os.path.dirname(os.path.realpath(spec.origin))


def folders() -> list[str]:
    """The folders of all copies, in the order in which Python finds them, links resolved; the first is imported."""
    specs = [PathFinder.find_spec(NAME, [entry]) for entry in sys.path]
    # an editable install has its own finder
    others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not PathFinder)
    specs += [find(NAME, None, None) for find in others if find is not None]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(os.path.dirname(os.path.realpath(origin)) for origin in origins))


def problems() -> list[str]:
    """One line for parts of different copies, or else for additional copies; none in a correct environment."""
    here, seams = core(), patches()
    # in a checkout they are next to the package
    if seams is not None and seams not in (os.path.join(folder, "patches") for folder in (here, os.path.dirname(here))):
        return [f"two copies are mixed: the core is {here}, its patches are {seams}; uninstall one of them"]
    hidden = ", ".join(folder for folder in folders() if folder != here)
    return [f"there are several copies: {here} is used, not used: {hidden}; remove the unwanted ones"] if hidden else []
