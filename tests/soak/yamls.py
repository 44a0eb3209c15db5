"""Yamls with mistakes through lint, the settings and the embedded trainer's reader: no traceback, no wait, one line.

    PYTHONPATH=tests python -m soak.yamls --examples 2500
    PYTHONPATH=tests python -m soak.yamls --seed 0 --replay 17

With MINDSPEED_MM_HOME the host's own yamls are among those that mistakes are put into. Exits with 1 where one fails: an
exception that is no user's error, more than one line, over a second of CPU time, or over 500 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from lint_cases import CLEAN
from mindspeed_chunk import yaml_text
from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError
from mindspeed_chunk.standalone.config import load_config
from mindspeed_chunk.tools import lint
from soak.mutants import mutant, seeds

WORLD = 16  # which the sizes of the examples and of the stock yamls divide
LIMIT = 1.0  # seconds of CPU time
LIMIT_BYTES = 500 * 10**6
_SECTIONS = ((ChunkMoEConfig, "parallel", "ep_plan"), (ChunkMBSConfig, "features", "chunkmbs_plan"))


class Failed(Exception):
    """What a reader did that it must not do."""


class TooLong(BaseException):
    """From the timer; no reader may catch it."""


def judge(data: bytes, folder: Path, limit: float) -> dict[str, str]:
    """What each reader made of the yaml, by its name: "taken" or "refused". Raises Failed."""
    path = folder / "config.yaml"
    path.write_bytes(data)
    readers: dict[str, Callable[[], None]] = {
        "lint": lambda: _lint(path),
        "settings": lambda: _settings(path),
        "trainer": lambda: _trainer(path),
    }
    return {name: _watched(name, reader, limit) for name, reader in readers.items()}


def warm(folder: Path) -> None:
    """Import what a reader imports, and build the examples' model: what is done once is no yaml's second."""
    path = folder / "warm.yaml"
    path.write_text(CLEAN, encoding="utf-8")
    _lint(path)


def _watched(name: str, reader: Callable[[], None], limit: float) -> str:
    began, told = time.process_time(), ""
    try:
        with _timer(5 * limit), _memory(LIMIT_BYTES):
            reader()
    except ConfigError as error:
        told = str(error)
        if not told or len(told.splitlines()) != 1:
            raise Failed(f"{name}: not one line: {told!r}") from None
    except Failed as error:
        raise Failed(f"{name}: {error}") from None
    except (Exception, TooLong):
        raise Failed(f"{name}: {traceback.format_exc()}") from None
    took = time.process_time() - began
    if took > limit:
        raise Failed(f"{name}: {took:.2f} s of CPU time")
    slowest[name] = max(slowest.get(name, 0.0), took)
    return "refused" if told else "taken"


slowest: dict[str, float] = {}


def _lint(path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    command = ["lint", str(path), "--world", str(WORLD), "--fix", str(path.with_name("fixed.yaml"))]
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = lint.main()
    if code == lint.UNREADABLE:
        told = err.getvalue()
        if out.getvalue() or not told.startswith("error: ") or len(told.splitlines()) != 1:
            raise Failed(f"not one line: {told!r}, {out.getvalue()!r}")
        raise ConfigError(told)
    findings = out.getvalue().partition("--- ")[0].splitlines()  # before the difference
    if code not in (0, 1) or err.getvalue() or not all(line.startswith(str(path)) for line in findings):
        raise Failed(f"exit code {code}, {err.getvalue()!r}, {findings}")


def _settings(path: Path) -> None:
    content = yaml_text.sections(yaml_text.read(path), str(path)).data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for settings, section, plan in _SECTIONS:
            found = content.get(section)
            if isinstance(found, dict) and plan in found:
                settings.from_mapping(found[plan])


def _trainer(path: Path) -> None:
    _, told = load_config(str(path), ["model.attn_implementation=sdpa"], WORLD)
    for line in told:
        if len(line.splitlines()) != 1:
            raise Failed(f"a warning of several lines: {line!r}")


@contextlib.contextmanager
def _timer(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TooLong(f"still at work after {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _memory(more: int) -> Iterator[None]:
    """Within, the process may have that many bytes more than now: a reader that takes them gets a MemoryError."""
    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m soak.yamls", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=2500, help="yamls to try (default: 2500)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of CPU time for each (default: {LIMIT:g})")
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="the yaml of this number alone")
    parser.add_argument("--all", action="store_true", help="go on after a failure")
    options = parser.parse_args(argv)
    texts, counts, failed = seeds(), Counter[str](), 0
    numbers = range(options.examples) if options.replay is None else [options.replay]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm(folder)
        for number in numbers:
            data = mutant(texts, options.seed, number)
            try:
                counts.update(f"{reader} {done}" for reader, done in judge(data, folder, options.limit).items())
            except Failed as error:
                failed += 1
                print(f"{error}\nfailed: --seed {options.seed} --replay {number}\n")
                if not options.all:
                    break
    told = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
    longest = ", ".join(f"{reader} {took:.2f} s" for reader, took in sorted(slowest.items()))
    print(
        f"seed {options.seed}: {len(numbers)} yamls from {len(set(texts))}, {failed} failed; {told}; at most: {longest}"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
