"""What commands print: whatever the terminal, the disk and the words of the user are."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_MOST_CHARS = 1000  # of an error


def console(**keywords: Any) -> Console:
    """A rich console that prints text as it is: no markup, no names of emojis."""
    from rich.console import Console  # doctor has no need of it for --json

    return Console(markup=False, emoji=False, **keywords)


def printable(text: str) -> str:
    """The text with every control character, line end and lone surrogate as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(text: str) -> str:
    """The text for matplotlib, which would read what stands between two dollar signs as a formula."""
    return printable(text).replace("$", r"\$")


def complain(message: object) -> int:
    """Print an error as one line on stderr. Returns the exit code for it."""
    text = printable(" ".join(str(message).split()))
    print(f"error: {text[:_MOST_CHARS]}{'...' * (len(text) > _MOST_CHARS)}", file=sys.stderr)
    return 2


def escape_unprintable() -> None:
    """From now on, print what the encoding of stdout does not have as an escape."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def unwritable(error: OSError) -> int:
    """The exit code where stdout does not take what is printed. Other errors are raised again."""
    if error.filename is not None or error.errno not in (errno.EPIPE, *_FULL):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush
    if error.errno == errno.EPIPE:  # the reader has seen enough
        return 128 + signal.SIGPIPE
    return complain(f"the output cannot be written: {error.strerror}; print to another place")
