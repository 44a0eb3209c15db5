"""MindSpeed-MM's wildcards for names of modules; only this module reads them.

`{*}` is any number, `{2-5}` a number of the range, `*` any text, `?` any character; a pattern matches whole names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from mindspeed_chunk.config import ConfigError

MAX_NAMES = 1000  # of one list
MAX_CHARS = 200  # of one name
MAX_EXAMPLES = 10_000  # of one pattern
_WILDCARD = re.compile(r"(\{[^}]*\}|\*|\?)")
_NUMBER = re.compile(r"\{(?:\*|(\d{1,18})-(\d{1,18}))\}")
_DIGITS = re.compile(r"\d{1,18}")
_MOST_DIGITS = 18
_ANY_NUMBER = range(10**_MOST_DIGITS)
# Numbers that have one more digit than the number before.
_TENS = frozenset(10**digits for digits in range(1, _MOST_DIGITS))


class Pattern:
    """One entry of a list of names at `path` of the yaml. Raises ConfigError if it cannot be read."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path
        if len(text) > MAX_CHARS:
            raise ConfigError.about(path, text, f"must have at most {MAX_CHARS} characters", "correct the name")
        self._parts: list[str | range] = []
        for part in filter(None, _WILDCARD.split(text)):
            self._parts.append(self._read_numbers(part) if part.startswith("{") else part)

    def _read_numbers(self, part: str) -> range:
        match = _NUMBER.fullmatch(part)
        numbers = range(int(match[1]), int(match[2]) + 1) if match and match[1] else _ANY_NUMBER
        if not match or not numbers:
            raise ConfigError.about(
                self.path, self.text, f"{part} is not a wildcard", "write {*} or a range such as {0-3}"
            )
        return numbers

    def matches(self, name: str) -> bool:
        # where the rest of the name may begin; a regular expression with many `*` would try every way to split the name
        begins = {0}
        for part in self._parts:
            if isinstance(part, range):
                begins = {end for begin in begins for end in _number_ends(name, begin, part)}
            elif part == "*":
                begins = set(range(min(begins), len(name) + 1))
            elif part == "?":
                begins = {begin + 1 for begin in begins if begin < len(name)}
            else:
                begins = {begin + len(part) for begin in begins if name.startswith(part, begin)}
            if not begins:
                return False
        return len(name) in begins

    def examples(self, others: Sequence[Pattern]) -> Iterator[str]:
        """Names that it matches, enough to find out which of them the others match.

        For a range: its ends, the neighbours of each number in another pattern's text and, if another pattern has a
        `?`, of each number with one more digit. For every other wildcard: 0, because there may be one layer. Raises
        ConfigError if there would be more than `MAX_EXAMPLES`.
        """
        numbers = {int(number) for other in others for number in _DIGITS.findall(other.text)}
        if any("?" in other.text for other in others):
            numbers |= _TENS
        marks = {at for number in numbers for at in (number - 1, number, number + 1)}
        choices: list[Sequence[str | int]] = []
        for part in self._parts:
            if part is _ANY_NUMBER or part in ("*", "?"):
                choices.append((0,))
            elif isinstance(part, range):
                choices.append(sorted({part.start, part.stop - 1, *(at for at in marks if at in part)}))
            else:
                choices.append((part,))
        for count, parts in enumerate(itertools.product(*choices)):
            if count == MAX_EXAMPLES:
                rule = f"matches more than {MAX_EXAMPLES} names to compare"
                raise ConfigError.about(self.path, self.text, rule, "write {*} instead of a range")
            yield "".join(map(str, parts))


def _number_ends(name: str, begin: int, numbers: range) -> Iterator[int]:
    """Where a number of the range that begins at `begin` may end."""
    end = begin
    while end < len(name) and end - begin < _MOST_DIGITS and name[end].isdecimal():
        end += 1
        if int(name[begin:end]) in numbers:
            yield end


def read_patterns(texts: Sequence[str], path: str) -> list[Pattern]:
    if len(texts) > MAX_NAMES:
        raise ConfigError.about(path, texts, f"more than {MAX_NAMES} names", "write wildcards such as {*}")
    return [Pattern(text, path) for text in texts]


def covered(pattern: Pattern, by: Sequence[Pattern]) -> bool:
    """Whether all that the pattern matches is matched by the others, judged by its examples."""
    return any(pattern.text == other.text for other in by) or all(
        any(other.matches(name) for other in by) for name in pattern.examples(by)
    )


def shares(region: Pattern, module: Pattern) -> bool:
    """Whether a module of one name can contain, be, or be inside a module of the other name.

    Judged by their examples; `*` in the second name matches modules anywhere.
    """

    def holds(name: str, example: str) -> bool:
        parts = example.split(".")
        return any(module.matches(".".join((name, *parts[start:]))) for start in range(len(parts)))

    return any(
        any(prefixes(example, [region])) or any(prefixes(name, [module])) or holds(name, example)
        for name, example in itertools.product(region.examples([module]), module.examples([region]))
    )


def prefixes(name: str, patterns: Sequence[Pattern]) -> Iterator[int]:
    """The numbers of leading segments of the name that make a name which one of the patterns matches."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if any(pattern.matches(".".join(parts[:count])) for pattern in patterns):
            yield count
