"""Checks that every rank runs the same configuration, through a key-value store, before the first collective.

Ranks whose settings differ make different collectives and hang. So the check makes no collective, either: each rank
puts its settings into the store of the default process group and, if it wants to, waits until all have done so. If all
settings are equal, a rank sends a few small messages to the store, for any number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from mindspeed_chunk import __version__
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.dist import default_store
from mindspeed_chunk.wording import SHOWN_CHARS

PATIENCE_S = 60.0
# The longest wait for another rank that has all it needs: only if it is killed or stopped does it take longer.
_FOR_A_STEP_S = 10.0
_LONGEST_PAUSE_S = 0.2
_MOST_SHOWN = 8
_NOT_SET = "not set"
_VERSION = "version of mindspeed_chunk"

Settings = Mapping[str, Any]


def check(settings: Settings, wait: bool, patience_s: float | None = None) -> None:
    """Give the other ranks of the default process group this rank's settings, and compare them.

    Args:
        settings: values by the keys that a user knows. A missing key is the same as one that is off: None, False, 0,
            empty.
        wait: whether to wait for the other ranks. A rank that does not wait is compared by those that do.
        patience_s: how long to wait for their settings; by default `PATIENCE_S`.

    Raises:
        ConfigError: on every rank that waits, with the same line: keys that differ with their values and ranks, or
            ranks that have not answered.
        Exception: any error of the store.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        compare(default_store(), rank, size, {_VERSION: __version__, **settings}, wait, patience_s or PATIENCE_S)


def compare(store: dist.Store, rank: int, size: int, settings: Settings, wait: bool, patience_s: float) -> None:
    """`check` with the caller's store."""
    board = _Board(store, rank, size)
    board.put(settings, wait)
    problem = board.problem(patience_s) if wait else ""
    if problem:
        raise ConfigError(f"every rank must run the same configuration, but {problem}")


class _Board:
    """The entries of the ranks in the store.

    A store may outlive a start of the ranks: torchrun restarts them with the same store. So counts have the number of
    the start in their key. If an earlier start failed early, ranks may disagree on this number. The last settings of a
    rank are under its own key. So ranks may then wait until the time is over, but never report equal settings as
    different.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._all = f"mindspeed_chunk/configuration/{size}"
        self._start = f"{self._all}/start {store.add(f'{self._all}/starts of {rank}', 1)}"
        self._settled = f"{self._start}/settled"

    def put(self, settings: Settings, wait: bool) -> None:
        """Write all entries of this rank. The settings themselves are written once, by the first rank that has them."""
        digest = _digest(settings)
        self._same = f"{self._start}/same {digest}"
        if self._store.add(self._same, 1) == 1:
            self._store.set(f"{self._all}/settings {digest}", _text(settings))
        self._store.set(f"{self._all}/rank {self._rank}", f"{digest} {wait:d}")
        if self._store.add(f"{self._start}/ranks", 1) == self._size:
            self._store.set(self._settled, "")

    def problem(self, patience_s: float) -> str:
        """The problem, the same text on every rank that waits; empty if all ranks have answered with equal settings."""
        if not self._wait_for(self._settled, patience_s):
            self._store.set(self._settled, "")  # the others need not wait any longer
        if self._store.add(self._same, 0) == self._size:
            return ""
        verdict = f"{self._start}/verdict"
        if self._store.add(f"{self._start}/readers", 1) == 1:  # one rank reads all settings, and reports to the others
            self._store.set(verdict, json.dumps(self._read(patience_s)))
        elif not self._wait_for(verdict, _FOR_A_STEP_S):
            return "the rank that compares the settings has not reported which keys differ"
        problem, waiting = json.loads(self._store.get(verdict))
        if problem:
            # the store may end with this rank, or with one that has seen that all have read; then none of them needs it
            with contextlib.suppress(RuntimeError):
                read_by = f"{self._start}/read"
                if self._store.add(f"{read_by} ranks", 1) == waiting:
                    self._store.set(read_by, "")
                self._wait_for(read_by, _FOR_A_STEP_S)
        return problem

    def _wait_for(self, key: str, seconds: float) -> bool:
        """Whether the key appears in time. It polls: the store's own wait cannot be interrupted, and writes a warning
        when it ends."""
        deadline = time.monotonic() + seconds
        pause_s = 0.001
        while not self._has(key):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _has(self, key: str) -> bool:
        return self._store.check([key])  # type: ignore[attr-defined,unused-ignore]  # not in torch 2.7.1's types

    def _read(self, patience_s: float) -> tuple[str, int]:
        """The problem, and how many ranks wait for it."""
        ranks: dict[str, list[int]] = {}
        silent, waiting = [], 0
        for rank in range(self._size):
            key = f"{self._all}/rank {rank}"
            if self._has(key):
                digest, waits = self._store.get(key).decode().split()
                ranks.setdefault(digest, []).append(rank)
                waiting += int(waits)
            else:
                silent.append(rank)
        settings = {each: json.loads(self._store.get(f"{self._all}/settings {each}")) for each in ranks}
        return describe([(settings[each], ranks[each]) for each in ranks], silent, patience_s), waiting


def describe(groups: list[tuple[Settings, list[int]]], silent: list[int], patience_s: float) -> str:
    """How groups of ranks with the same settings differ, and which ranks did not answer; empty if there is no problem.

    One line, whose length does not grow with the number of ranks.
    """
    keys = sorted({key for settings, _ in groups for key in settings})
    differing = [key for key in keys if len({_text(_alike(settings.get(key))) for settings, _ in groups}) > 1]
    parts = _first([_difference(key, groups) for key in differing], "keys")
    if differing:
        parts.append("start all ranks with the same yaml, arguments, environment and version of the plugin")
    if silent:
        problem = f"{_names(silent)}: no answer within {patience_s:.0f} s"
        cure = "start all ranks at the same time, install the plugin there, and do not turn it off"
        parts.append(f"{problem}: {cure} (MINDSPEED_CHUNK_DISABLE)")
    return "; ".join(parts)


def _difference(key: str, groups: list[tuple[Settings, list[int]]]) -> str:
    """Each value of the key with its ranks."""
    settings_of: dict[str, Settings] = {}
    ranks_of: dict[str, list[int]] = {}
    for settings, ranks in groups:
        alike = _text(_alike(settings.get(key)))
        settings_of.setdefault(alike, settings)
        ranks_of.setdefault(alike, []).extend(ranks)
    shown = _shown([settings.get(key, _NOT_SET) for settings in settings_of.values()])
    texts = [f"{value} on {_names(sorted(ranks))}" for value, ranks in zip(shown, ranks_of.values(), strict=True)]
    return f"{key}: {', '.join(_first(texts, 'values'))}"


def _shown(values: list[Any]) -> list[str]:
    """Each as Python writes it, long ones shortened; of lists only items that are not in all, since names are long."""
    texts = [repr(value) if value not in (_NOT_SET, "") else _NOT_SET for value in values]
    if all(isinstance(value, list) for value in values):
        own = [[item for item in value if not all(item in other for other in values)] for value in values]
        if any(own):
            texts = [f"[{', '.join(['...', *map(repr, items)])}]" for items in own]
    return [text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..." for text in texts]


def _names(ranks: list[int]) -> str:
    """Sorted ranks in words, as "ranks 0-2, 4"; if there are many, only the first ones."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    if len(words) > _MOST_SHOWN:
        words[_MOST_SHOWN:] = [f"... ({len(ranks)} in all)"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def _first(texts: list[str], what: str) -> list[str]:
    more = len(texts) - _MOST_SHOWN
    return texts if more <= 0 else [*texts[:_MOST_SHOWN], f"and {more} more {what}"]


def _alike(value: Any) -> Any:
    """The same for all values that mean off: versions of the host use different ones for a missing key."""
    return value or None


def _digest(settings: Settings) -> str:
    on = {key: value for key, value in settings.items() if _alike(value) is not None}
    return hashlib.sha256(_text(on).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    """The same text for the same value in every process, with any hash seed and addresses."""
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def flatten(section: object, path: str) -> dict[str, Any]:
    """The values of a section of a yaml by their paths. A section is a mapping, a dataclass or a model of pydantic, and
    may contain others."""
    if hasattr(section, "model_dump"):
        section = section.model_dump(warnings=False)
    elif dataclasses.is_dataclass(section):
        section = vars(section)
    if not isinstance(section, Mapping):
        return {path: section}
    return {key: value for name, inner in section.items() for key, value in flatten(inner, f"{path}.{name}").items()}
