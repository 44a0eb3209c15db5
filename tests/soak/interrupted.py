"""`mindspeed-chunk bench` and `trace` are interrupted at random moments: do they end at once, and leave nothing?

    PYTHONPATH=tests python -m soak.interrupted

Each command runs without a link, with one between two ranks, and with one among three, and gets each of KINDS once, at
a moment that the seed draws. Nothing may be left: no process, port or shared memory, no namespace, no link, no file.
What a killed command cannot take down, the next link must. Exits with 1 where one of that is not so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field

from launcher import HANG_S
from mindspeed_chunk.tools.link import LinkError, limited_link
from soak.watched import Watched
from zygote import children_of

COMMAND = "PYTHONPATH=tests python -m soak.interrupted"
INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
SINGLE = [(INT,), (TERM,), (HUP,), (KILL,)]
PAIRS = [(INT, INT), (TERM, TERM), (INT, TERM), (HUP, INT), (INT, KILL), (TERM, KILL)]
KINDS = SINGLE + PAIRS
# what is inherited as ignored stays ignored: a command that is to be interrupted starts with the defaults
WITH_DEFAULTS = ["env", "--default-signal=INT,TERM,HUP"]
SIZES = "--tokens 16 --hidden 8 --intermediate 8 --top-k 1 --experts 6".split()
ENDLESS = {"bench": ["--repeats", "100000"], "trace": ["--calls", "1000"]}
LINKS = {"no link": [], "two linked": ["--link", "1gbit"], "three linked": ["--link", "1gbit", "--ranks", "3"]}
FROM_START_S, FROM_LAUNCH_S, BETWEEN_S = 5.0, 1.0, 0.3  # the longest times that are drawn
POLL_S = 0.005


@dataclass
class Fate:
    """How a launch ended. seconds: from the last signal to the end of its last process; wrong: what must not be."""

    seconds: float = float("nan")
    when: str = ""
    wrong: list[str] = field(default_factory=list)


def interrupt(command: str, linked: str, kind: tuple[signal.Signals, ...], draw: random.Random, limit: float) -> Fate:
    """Start the command, send the signals, and see what is there when all has come to rest."""
    fate = Fate()
    words = [sys.executable, "-m", "mindspeed_chunk.tools", command, *ENDLESS[command], *SIZES, *LINKS[linked]]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Watched() as watched:
        environment = {**os.environ, **watched.environment, "TMPDIR": folder}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(
            [*WITH_DEFAULTS, *words], cwd=folder, env=environment, start_new_session=True, **quiet
        )
        fate.when = _wait_for_the_moment(process, draw)
        for number, each in enumerate(kind):
            time.sleep(draw.uniform(0, BETWEEN_S) if number else 0)
            _send(process, each, to_all=each != KILL and draw.random() < 0.5)
        sent = time.monotonic()
        try:
            code = process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        while watched.running() and time.monotonic() < sent + HANG_S:
            time.sleep(POLL_S)
        fate.seconds = time.monotonic() - sent
        if not code:
            fate.wrong.append(f"went on, or ended with {code}")
        if fate.seconds > limit:
            fate.wrong.append(f"ended after {fate.seconds:.1f} s")
        if KILL in kind and LINKS[linked]:
            with limited_link("1gbit"):
                pass
        # torch makes a folder for its compiled kernels, and keeps it
        files = [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]
        fate.wrong += [f"left: {left}" for left in [*watched.left(), *_network(process.pid), *files]]
    return fate


def _wait_for_the_moment(process: subprocess.Popen, draw: random.Random) -> str:
    """Half of the moments are near the launch of the ranks, which begins with the first child."""
    if draw.random() < 0.5:
        seconds, after = draw.uniform(0, FROM_START_S), "start"
    else:
        seconds, after = draw.uniform(0, FROM_LAUNCH_S), "launch"
        end = time.monotonic() + HANG_S
        while process.poll() is None and not children_of(process.pid) and time.monotonic() < end:
            time.sleep(POLL_S)
    time.sleep(seconds)
    return f"{seconds:.2f} s after its {after}"


def _send(process: subprocess.Popen, number: signal.Signals, to_all: bool) -> None:
    """To the command, or, as a terminal does it, to all that belong to it."""
    if process.poll() is None:
        (os.killpg if to_all else os.kill)(process.pid, number)


def _network(pid: int) -> list[str]:
    """Namespaces and links that have the name of a process's."""
    if not shutil.which("ip"):
        return []
    told = {}
    for what, command in {"namespace": ["ip", "netns"], "link": ["ip", "-brief", "link"]}.items():
        told[what] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [f"{what} {line}" for what, text in told.items() for line in text.splitlines() if f"mc{pid}" in line]


def links_can_be_had() -> bool:
    try:
        with limited_link("1gbit"):
            return True
    except LinkError as error:
        print(f"without links: {error}")
        return False


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, help="how many of all (default: each kind in each way once)")
    parser.add_argument("--seed", type=int, default=0, help="of their order and moments (default: 0)")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that they have to end (default: 10)")
    options = parser.parse_args(argv)
    linked = list(LINKS) if links_can_be_had() else ["no link"]
    launches = list(itertools.product(ENDLESS, linked, KINDS))
    random.Random(options.seed).shuffle(launches)
    launches, slowest, failed = launches[: options.launches], 0.0, 0
    counts: Counter[str] = Counter()
    for number, (command, link, kind) in enumerate(launches):
        fate = interrupt(command, link, kind, random.Random(f"{options.seed} {number}"), options.limit)
        name = " ".join(each.name.removeprefix("SIG") for each in kind)
        slowest, failed = max(slowest, fate.seconds), failed + bool(fate.wrong)
        counts[name] += not fate.wrong
        verdict = "; ".join(fate.wrong) or "ok"
        print(f"{command}, {link}, {name}, {fate.when}: {fate.seconds:.1f} s: {verdict}", flush=True)
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))
    print(
        f"{len(launches) - failed} of {len(launches)} ended at once and left nothing, the slowest after {slowest:.1f} s"
    )
    return 1 if failed or not launches else 0


if __name__ == "__main__":
    sys.exit(main())
