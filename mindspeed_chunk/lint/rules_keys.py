"""Rules on the spelling and the place of keys. The host accepts any key and reports no unknown one."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mindspeed_chunk import keys
from mindspeed_chunk.config import KEY_PREFIXES, ConfigError
from mindspeed_chunk.lint.edits import Rename, Set
from mindspeed_chunk.lint.rule import ERROR, WARNING, Problem, Rule, Subject
from mindspeed_chunk.moe.checks import DISPATCHER, NAME

_SLIPS = 2  # letters that --fix corrects


def _unknown(subject: Subject) -> Iterator[tuple[str, str, str]]:
    """Section, key and path of each key that the table of keys does not have."""
    for section in keys.PATHS:
        content = subject.get(section) if section else subject.settings
        for key in content if isinstance(content, dict) else ():
            if isinstance(key, str) and key not in keys.at(section):
                yield section, key, keys.joined(section, key)


def _refused_anyway(subject: Subject, section: str, key: str) -> bool:
    """Whether the checks of a feature run and refuse an unknown key of this kind."""
    if section == "parallel.ep_plan":
        return key.startswith(KEY_PREFIXES) and subject.get(DISPATCHER) == NAME
    return section == "features.chunkmbs_plan" and subject.get("features.enable_chunk_mbs", False)


def respelt(path: str, section: str, present: Collection[str]) -> tuple[Rename, ...]:
    """The correction of an unknown key, if it is clear. `present`: the keys that the section has."""
    key = path.rpartition(".")[2]
    near = keys.nearest(key, section)
    plain = len(near) == 1 and near[0] not in present and letters_apart(key, near[0]) <= _SLIPS
    return (Rename(path, near[0]),) if plain else ()


def letters_apart(one: str, other: str) -> int:
    """The least number of letters to add, remove or change that makes one word the other."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        last, row = row, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(row[-1] + 1, last[j] + 1, last[j - 1] + (letter != wanted)))
    return row[-1]


def misspelt(subject: Subject) -> Iterator[Problem]:
    for section, key, path in _unknown(subject):
        if key in keys.HOMES or _refused_anyway(subject, section, key):
            continue
        present = subject.get(section) if section else subject.settings
        if keys.nearest(key, section):
            yield Problem(keys.unknown(path, present[key], section), respelt(path, section, present))


def misplaced(subject: Subject) -> Iterator[Problem]:
    for section, key, path in _unknown(subject):
        home = keys.HOMES.get(key)
        if home and home != section and not _refused_anyway(subject, section, key):
            rule = "has no effect here"
            yield Problem(ConfigError.about(path, subject.get(path), rule, f"it belongs under {home}"))


def dispatcher(subject: Subject) -> Iterator[Problem]:
    value = subject.get(DISPATCHER, "alltoall")
    rule = keys.at(DISPATCHER).lint
    if not rule.holds(value):
        meant = keys.near(value, keys.DISPATCHERS)
        way_out = f"the nearest one is {meant[0]}" if meant else f"{NAME}, or alltoall for the plain one"
        error = ConfigError.about(DISPATCHER, value, rule.words, way_out)
        yield Problem(error, tuple(Set(DISPATCHER, name) for name in meant if len(meant) == 1))


RULES = (
    Rule("misspelt-key", WARNING, "A key is unknown and near to one that is known.", misspelt),
    Rule("misplaced-key", WARNING, "A key of Chunk MoE or ChunkMBS is in a section where it has no effect.",
         misplaced),
    Rule("dispatcher-name", ERROR, "`parallel.ep_plan.dispatcher` names no dispatcher.", dispatcher),
)  # fmt: skip
