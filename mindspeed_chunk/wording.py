"""How a message shows a user's value: short, on one line, and without time and memory for the whole value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SHOWN_CHARS = 80
# limits of the text of an error, and of a path or a name in it
LINE_CHARS, NAME_CHARS = 2000, 200
_MORE = "..."
_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), dict: ("{", "}")}


def shown(value: object) -> str:
    """The beginning of `repr(value)`; the rest is not computed."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > SHOWN_CHARS:
            return " ".join(text[:SHOWN_CHARS].split()) + _MORE
    return " ".join(text.split())


def shortened(text: str, limit: int = NAME_CHARS) -> str:
    """The text, or its beginning and its end if it is longer than the limit."""
    if len(text) <= limit:
        return text
    half = (limit - len(_MORE)) // 2
    return text[:half] + _MORE + text[-half:]


def one_line(text: str) -> str:
    """The text with line ends, control characters and characters without encoding in the form of `repr`."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in shortened(text, LINE_CHARS))


def _pieces(value: Any) -> Iterator[str]:
    kind = type(value)
    if kind in (str, bytes):
        yield repr(value[: SHOWN_CHARS + 1])
    elif kind in _BRACKETS and value:
        opening, closing = _BRACKETS[kind]
        yield opening
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(item)
            if kind is dict:
                yield ": "
                yield from _pieces(value[item])
        yield ",)" if kind is tuple and len(value) == 1 else closing
    else:
        try:
            yield repr(value)
        except ValueError:  # an integer of more digits than Python writes
            yield hex(value)
