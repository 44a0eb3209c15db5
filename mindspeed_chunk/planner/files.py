"""Small files of a user, whatever is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_chunk.config import ConfigError


def read(option: str, given: str, path: Path, load: Callable[[str], Any], most_bytes: int, way_out: str) -> Any:
    """What `load` makes of the text of a file.

    Args:
        given: what the user gave for `option`, to name in an error.
        load: may raise anything.

    Raises:
        ConfigError: for what keeps the file from being read.
    """
    try:
        if path.stat().st_size > most_bytes:
            reason = f"has more than {most_bytes} bytes"
        elif not path.is_file():
            reason = "is no file"
        else:
            return load(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except RecursionError:
        reason = "cannot be read: too many brackets inside of each other"
    # yaml's constructors raise what they meet, such as KeyError for `!!bool x`
    except Exception as error:
        reason = f"cannot be read: {' '.join(str(error).split()) or type(error).__name__}"
    raise ConfigError.about(option, given, f"{path.name[-80:]} {reason}", way_out)


