"""Rules for the values of keys, with the words of their errors. All readers of a yaml share them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mindspeed_chunk.wording import one_line, shortened, shown

Get = Callable[[str], Any]  # the value at a path of a yaml; None if there is none

INTEGERS_BELOW = 2**63
DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
_DIGITS = re.compile(r"[+-]?\d{1,18}")
_TRUE, _FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")
_FLAGS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)


class ConfigError(ValueError):
    """A setting is wrong; the message is one line. `path`: the key of the yaml, or empty."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(one_line(message))
        self.path = path

    @classmethod
    def about(cls, path: str, value: object, rule: str, way_out: str) -> ConfigError:
        """The error "<yaml path>: <value>: <rule>; <way out>"."""
        return cls(f"{shortened(path)}: {shown(value)}: {rule}; {way_out}", path)


class ValueRule(NamedTuple):
    """What a value must be.

    words, way_out: the rule and the way out in an error.
    of_type: whether a value has the right type.
    in_range: whether a value of the right type is in range.
    made: converts a right value to the one that readers use.
    from_host: converts a value as MindSpeed-MM does before it checks the type: "2" to 2.
    """

    words: str
    way_out: str
    of_type: Callable[[Any], bool]
    in_range: Callable[[Any], bool] = lambda value: True
    made: Callable[[Any], Any] = lambda value: value
    from_host: Callable[[Any], Any] = lambda value: value

    def holds(self, value: object) -> bool:
        return self.of_type(value) and self.in_range(value)

    def strict(self) -> ValueRule:
        """The rule of a key whose value the host passes on as it is."""
        return self._replace(from_host=lambda value: value)

    def take(self, path: str, value: object) -> Any:
        """The value of the key at the path, as readers use it. Raises ConfigError if it breaks the rule."""
        if not self.holds(value):
            raise self._error(path, value)
        return self.made(value)

    def take_type(self, path: str, value: object) -> Any:
        """The value as the host reads it, maybe out of range. Raises ConfigError if it has a wrong type."""
        taken = self.from_host(value)
        if not self.of_type(taken):
            raise self._error(path, value)
        return taken

    def _error(self, path: str, value: object) -> ConfigError:
        too_large = isinstance(value, int) and value >= INTEGERS_BELOW
        return ConfigError.about(path, value, "must be below 2^63" if too_large else self.words, self.way_out)


def integer(least: int, way_out: str = "correct or remove it") -> ValueRule:
    return ValueRule(
        f"must be an integer >= {least}", way_out, _is_integer, lambda value: least <= value < INTEGERS_BELOW,
        from_host=_host_integer,
    )  # fmt: skip


def number(least: float, below: float = float("inf")) -> ValueRule:
    bound = f" and < {below:g}" if below < float("inf") else ""
    return ValueRule(
        f"must be a number >= {least:g}{bound}", "correct or remove it", _is_number,
        lambda value: least <= float(value) < below, made=float,
    )  # fmt: skip


def choice(*choices: str, also: tuple[str, ...] = ()) -> ValueRule:
    """One of `choices`; the first is the default. `also`: further values, which the error does not list."""
    return ValueRule(
        f"must be one of {', '.join(choices)}", f"remove the key to get {choices[0]}",
        lambda value: isinstance(value, str), lambda value: value in (*choices, *also),
    )  # fmt: skip


def _is_integer(value: object) -> bool:
    # A boolean is an int in Python, but `moe_num_chunks: true` is a mistake.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    try:
        # yaml reads 1e-4 (no dot) as text; MindSpeed-MM reads it as a number, and so do we
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, bool)


def _host_integer(value: object) -> object:
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()) or isinstance(value, float) and value % 1 == 0:
        return int(value)
    return value


def _host_flag(value: object) -> object:
    if isinstance(value, str):
        return _FLAGS.get(value.lower(), value)
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _list_of(of_type: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(of_type, value))


FLAG = ValueRule(
    "must be a boolean", "write true or false, without quotes", lambda value: isinstance(value, bool),
    from_host=_host_flag,
)  # fmt: skip
TEXT = ValueRule("must be text", "put it in quotes", lambda value: isinstance(value, str))
NAMES = ValueRule(
    "must be a list of names", "write [name], or [] for none", _list_of(lambda item: isinstance(item, str)),
    lambda value: "" not in value, made=tuple,
)  # fmt: skip
INDICES = ValueRule(
    "must be a list of integers >= 0", "write [0], or [] for none", _list_of(_is_integer),
    lambda value: all(item >= 0 for item in value), made=tuple,
    from_host=lambda value: list(map(_host_integer, value)) if isinstance(value, list) else value,
)  # fmt: skip
MAPPING = ValueRule("must be a mapping", "write its keys below it, indented", lambda value: isinstance(value, Mapping))
COUNT = integer(1)
AUTO_OR_COUNT = COUNT._replace(
    words="must be auto or an integer >= 1", way_out="write auto",
    of_type=lambda value: value == "auto" or _is_integer(value),
    in_range=lambda value: value == "auto" or value >= 1,
)  # fmt: skip
BATCH_DIM = integer(0)._replace(
    words="must be 0 or 1", way_out="write 0 for [B, S, H], 1 for [S, B, H]", in_range=lambda value: value in (0, 1)
)
DTYPE = choice(*DTYPES)._replace(made=DTYPES.get)
