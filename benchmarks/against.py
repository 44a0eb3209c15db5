"""`mindspeed-chunk bench` on this working tree and on a commit, in turns: is the layer faster or slower than there?

    python benchmarks/against.py HEAD~1 -- --link 1gbit --cases rolling:1,rolling:4
    python benchmarks/against.py v0.1.0 --rounds 5 --record layer -- --link 1gbit

What follows `--` goes to `bench`, which checks values before it times. Each round runs both trees, in alternating
order; a case's time is the median of all rounds. `--record` writes all that was measured, of both trees, to
benchmarks/records/DATE-NAME.json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import example
from mindspeed_chunk import files
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.tools.parser import Parser, check_range

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
HERE = "working tree"


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("commit", metavar="COMMIT", help="what `git rev-parse` reads")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each tree (default: 3)")
    parser.add_argument("--record", metavar="NAME", help="write benchmarks/records/DATE-NAME.json")
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:own])
    try:
        check_range(options, {"rounds": (1, 99)})
        commit = git("rev-parse", "--short", "--verify", f"{options.commit}^{{commit}}").strip()
        with tempfile.TemporaryDirectory() as folder:
            extract(commit, Path(folder))
            records = run(options.rounds, {commit: Path(folder), HERE: ROOT}, words[own + 1 :])
    except ConfigError as error:
        parser.error(str(error))
    report(records, commit)
    if options.record:
        RECORDS.mkdir(exist_ok=True)
        path = RECORDS / f"{time.strftime('%Y-%m-%d')}-{options.record}.json"
        files.write(path, json.dumps(records, indent=1) + "\n", "--record")
        print(f"written: {path.relative_to(ROOT)}")
    return 0


def git(*words):
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def extract(commit, folder):
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)


def run(rounds, trees, words):
    """The records of `bench --json`, by tree."""
    records: dict[str, list] = {name: [] for name in trees}
    for number in range(rounds):
        for name in sorted(trees, reverse=number % 2 == 1):
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
            records[name].append(bench(trees[name], words))
    return records


def bench(tree, words):
    """One record. Python imports the package from the folder in which it runs."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "mindspeed_chunk.tools", "bench", *words, "--json", file.name]
        # an installed package is found after this one
        path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(done.returncode)  # it has said why
        return json.loads(Path(file.name).read_text())


def times(records):
    """{(case, link): the milliseconds of all rounds}"""
    found: dict[tuple, list] = {}
    for record in records:
        for case in record["cases"]:
            found.setdefault((case["case"], case["link"]), []).extend(case["ms"])
    return found


def report(records, commit):
    old, new, rows = times(records[commit]), times(records[HERE]), []
    for key in (key for key in old if key in new):
        cells = []
        for values in (old[key], new[key]):
            low, middle, high = statistics.quantiles(values, n=4)
            cells.append(f"{middle:.1f} ({low:.1f} - {high:.1f})")
        ratio = statistics.median(new[key]) / statistics.median(old[key])
        rows.append((*key, *cells, f"{ratio:.3f}"))
    columns = ("case", "link", f"ms, {commit}", f"ms, {HERE}", "ratio")
    example.show(f"one layer, {len(records[HERE])} rounds; medians, quartiles", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
