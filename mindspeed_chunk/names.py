"""MindSpeed-MM's wildcards for names of modules, the only place that reads them.

`{*}` is any number, `{2-5}` one of a range, `*` any text, `?` any character; a pattern means whole names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from mindspeed_chunk.config import ConfigError

_WILDCARD = re.compile(r"(\{[^}]*\}|\*|\?)")
_NUMBER = re.compile(r"\{(?:\*|(\d+)-(\d+))\}")


class Pattern:
    """One entry of a list of names, which stands at `path` of the yaml. Raises ConfigError where it cannot be read."""

    def __init__(self, text: str, path: str) -> None:
        self.text = text
        self._choices: list[Sequence[str | int]] = []
        self._ranges: list[range | None] = []
        regex = ""
        for part in _WILDCARD.split(text):
            if part.startswith("{"):
                numbers = self._read_numbers(part, path)
                regex += r"(\d+)"
                self._ranges.append(numbers)
                self._choices.append([0] if numbers is None else numbers)
            elif part in ("*", "?"):
                regex += ".*" if part == "*" else "."
                self._choices.append(["0"])
            else:
                regex += re.escape(part)
                self._choices.append([part])
        self._regex = re.compile(regex)

    def _read_numbers(self, part: str, path: str) -> range | None:
        found = _NUMBER.fullmatch(part)
        numbers = range(int(found[1]), int(found[2]) + 1) if found and found[1] else None
        if not found or numbers is not None and not numbers:
            raise ConfigError.about(path, self.text, f"{part} is no wildcard", "write {*} or a range such as {0-3}")
        return numbers

    def matches(self, name: str) -> bool:
        found = self._regex.fullmatch(name)
        return found is not None and all(r is None or int(n) in r for n, r in zip(found.groups(), self._ranges))

    def examples(self) -> Iterator[str]:
        """Names that it matches: all numbers of a range, a 0 for every other wildcard, for there may be one layer."""
        return ("".join(map(str, parts)) for parts in itertools.product(*self._choices))


def read_patterns(texts: Iterable[str], path: str) -> list[Pattern]:
    return [Pattern(text, path) for text in texts]


def covered(pattern: Pattern, by: Sequence[Pattern]) -> bool:
    """Whether what the pattern matches is matched by the others, as far as its examples tell."""
    return all(any(other.matches(name) for other in by) for name in pattern.examples())


def shares(region: Pattern, module: Pattern) -> bool:
    """Whether a module of the one name can hold, be, or stand inside of, a module of the other.

    As far as their examples tell; `*` in the second name stands for modules anywhere.
    """

    def holds(name: str, example: str) -> bool:
        parts = example.split(".")
        return any(module.matches(".".join((name, *parts[start:]))) for start in range(len(parts)))

    return any(
        any(prefixes(example, [region])) or any(prefixes(name, [module])) or holds(name, example)
        for name, example in itertools.product(region.examples(), module.examples())
    )


def prefixes(name: str, patterns: Sequence[Pattern]) -> Iterator[int]:
    """How many segments of the name make a name that one of the patterns matches."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if any(pattern.matches(".".join(parts[:count])) for pattern in patterns):
            yield count
