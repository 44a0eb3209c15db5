"""Writes a user's file so that nothing is lost: it has its complete old or its complete new content."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_chunk.config import ConfigError


def write(path: Path, content: str | bytes, argument: str) -> None:
    """Write `content` to the file at `path`; text as UTF-8, line ends as they are.

    It is written next to the file, synced, and renamed. So the file's mode stays, its owner if the system allows it,
    and other hard links of it keep the old content. A symbolic link stays, and the file that it points to is replaced.
    A path that is not a regular file, such as /dev/stdout, is written directly.

    Raises ConfigError about the `argument`; the file is then unchanged.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
        target = Path(os.path.realpath(path))
        if path.exists() and (stream := _stream_of(path)):
            stream.flush()
            with os.fdopen(os.dup(stream.fileno()), "wb") as file:
                file.write(data)
        elif target.exists() and not target.is_file():
            with target.open("wb") as file:
                file.write(data)
        else:
            with _temporary_next_to(target) as (temporary, descriptor):
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            _sync_folder(target.parent)
    except (OSError, ValueError) as error:  # a name may have characters that no file name can have
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError.about(argument, str(path), f"cannot be written: {reason}", "give another file") from None


def write_figure(path: Path, figure: Any, argument: str) -> None:
    """Write a figure of matplotlib with `write`, in the format of the path's ending."""
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=120, format=path.suffix.removeprefix(".") or "png")
    except ValueError as error:
        raise ConfigError.about(argument, str(path), str(error), "give a name that ends in .png") from None
    write(path, drawn.getvalue(), argument)


@contextlib.contextmanager
def _temporary_next_to(target: Path) -> Iterator[tuple[Path, int]]:
    """A new open file with the rights of the target; it is removed afterwards if it has not been renamed."""
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(0, "it is read-only")
    temporary = target.parent / f".{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with contextlib.suppress(FileNotFoundError):
            old = target.stat()
            with contextlib.suppress(PermissionError):  # only root may give a file away
                os.fchown(descriptor, old.st_uid, old.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
        yield temporary, descriptor
    finally:
        temporary.unlink(missing_ok=True)


def _stream_of(path: Path) -> Any:
    """This program's own output stream, if the file is that stream: later output must go there, too."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is not a file
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return stream
    return None


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every folder can be read, or synced, and the file is in place
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
