"""The common part of all commands: a fault in the input or the output is reported in one line."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable

from mindspeed_chunk.config import ConfigError

USER_ERROR = 2
# errors of a stream; an error about a file has a file name
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def run(main: Callable[[], int]) -> int:
    """The exit code of a command with the function `main`: its own, or 2 after a user's error, reported in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack characters
    try:
        try:
            return main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at exit
        if error.errno == errno.EPIPE:  # the reader of the output has closed it
            return 128 + signal.SIGPIPE
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return USER_ERROR


def variable(name: str, default: int) -> int:
    """An integer >= 0 in the environment, as torchrun sets it. Raises ConfigError."""
    value = os.environ.get(name, str(default))
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        way_out = "start with torchrun, which sets it, or unset it"
        raise ConfigError.about(f"environment variable {name}", value, "must be an integer >= 0", way_out)
    return int(value)
