"""One rank of the embedded trainer is killed in the middle of a step: do the others end, in time, and leave nothing?

    PYTHONPATH=tests python -m soak.killed_rank

At each moment twice: without anybody who watches over the ranks, where every other rank must raise by itself within the
process group's timeout and some grace; and under torchrun, which must end with an error. Afterwards no process of the
run may be left, no listening port and no shared memory. Exits with 1 where one of that is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from launcher import HANG_S, Outcome, run_ranks, torchrun
from mindspeed_chunk.tools.environment import versions
from soak.killed import MOMENTS, train_until_killed
from soak.trained import write_model
from soak.watched import Watched

COMMAND = "PYTHONPATH=tests python -m soak.killed_rank"
EXIT_S = 60.0  # for a rank that has raised to take down its interpreter, on a busy machine
DID_NOT_EXIT = "did not exit"  # the launcher's words, of a rank that raised and yet had to be killed
SHOWN_CHARS = 160
ALONE, TORCHRUN = "alone", "torchrun"


@dataclass
class Fate:
    """How a run ended. seconds: from the death of the culprit to the end of the last other rank, or of torchrun.
    error: of the first other rank to fail, or torchrun's; wrong: what must not be."""

    moment: str
    how: str
    seconds: float = float("nan")
    error: str = ""
    processes: int = 0
    wrong: list[str] = field(default_factory=list)


def kill(moment: str, how: str, ranks: int, culprit: int, timeout: float, grace: float) -> Fate:
    """Run until the culprit is gone and everything has come to rest."""
    fate = Fate(moment, how)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Watched() as watched:
        last_words = Path(folder) / "killed"
        write_model(Path(folder))
        run = _alone if how == ALONE else _torchrun
        run(fate, watched, folder, ranks, culprit, timeout, grace)
        fate.processes = len(watched.pids)
        fate.wrong += [f"left: {left}" for left in watched.left()]
        if not last_words.exists():
            fate.wrong.append("the rank was never killed")
        elif not fate.seconds <= timeout + grace:
            fate.wrong.append(f"took {fate.seconds:.1f} s")
    return fate


def _alone(fate: Fate, watched: Watched, folder: str, ranks: int, culprit: int, timeout: float, grace: float) -> None:
    outcomes = run_ranks(
        train_until_killed,
        ranks,
        folder,
        fate.moment,
        culprit,
        collective_timeout=timeout,
        grace=timeout + EXIT_S,
        env=watched.environment,
        fill_nan=False,
        expect_failure=True,
    )
    others = sorted((o for o in outcomes if o.rank != culprit), key=lambda outcome: outcome.failed_at)
    fate.error = _last_line(others[0])
    last_words = Path(folder) / "killed"
    if last_words.exists():
        fate.seconds = others[-1].failed_at - float(last_words.read_text())
    for other in others:
        if other.state != "raised" or DID_NOT_EXIT in other.error:
            fate.wrong.append(f"rank {other.rank} {other.state}: {other.error[-2000:]}")


def _torchrun(
    fate: Fate, watched: Watched, folder: str, ranks: int, culprit: int, timeout: float, grace: float
) -> None:
    command = [*torchrun(ranks), "-m", "soak.killed", folder, str(timeout), fate.moment, str(culprit)]
    environment = {**os.environ, **watched.environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with open(Path(folder) / "log", "w+", encoding="utf-8") as log:
        try:
            code = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=HANG_S).returncode
        except subprocess.TimeoutExpired:
            code = 0
        ended = time.monotonic()
        log.seek(0)
        text = log.read()
    last_words = Path(folder) / "killed"
    if last_words.exists():
        fate.seconds = ended - float(last_words.read_text())
    fate.error = next((line.strip() for line in text.splitlines() if "SIGKILL" in line), "")
    if code == 0 or not fate.error:
        fate.wrong.append(f"torchrun ended with {code} and said: {text[-2000:]}")


def _last_line(outcome: Outcome) -> str:
    return outcome.error.strip().rpartition("\n")[2]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="a multiple of 2 (default: 4)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds, of the process group (default: 10)")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds more, to end in (default: 10)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="moments and ways with TEXT in their name")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the record")
    options = parser.parse_args(argv)
    fates = []
    for number, moment in enumerate(MOMENTS):
        for how in (ALONE, TORCHRUN):
            if options.only and not all(text in f"{moment}, {how}" for text in options.only):
                continue
            culprit = number % options.ranks  # each of them in turn
            fate = kill(moment, how, options.ranks, culprit, options.timeout, options.grace)
            fates.append(fate)
            verdict = "; ".join(fate.wrong) or "ok"
            seen = f"{fate.seconds:.1f} s, {fate.processes} processes, {fate.error[:SHOWN_CHARS]}"
            print(f"{moment}, {how}: {seen}: {verdict}", flush=True)
    if options.out:
        record = {"date": date.today().isoformat(), "versions": versions(), "options": vars(options) | {"out": None}}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record | {"fates": list(map(asdict, fates))}), encoding="utf-8")
    return 1 if not fates or any(fate.wrong for fate in fates) else 0


if __name__ == "__main__":
    sys.exit(main())
