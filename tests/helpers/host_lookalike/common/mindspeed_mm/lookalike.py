"""What a test wants to know of a run: which dispatcher ran, and whose code was on the stack when it did."""

import sys

ran = []
offloaded = []  # batch sizes of the blocks whose input left
stack_modules = set()


def note(name):
    """Called by each dispatcher of the look-alike as it starts."""
    ran.append(name)
    frame = sys._getframe(1)
    while frame is not None:
        stack_modules.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
