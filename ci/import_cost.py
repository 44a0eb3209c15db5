"""What the plugin adds to `import torch`: fresh processes with and without it, in turns.

    python ci/import_cost.py [--runs 21]

"without" is TORCH_DEVICE_BACKEND_AUTOLOAD=0, with which torch does not even look for plugins. Exits with 1 where the
plugin costs more than 30 ms of processor time; time on the clock is printed too, but on a shared machine it tells of
the other processes.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

BOUND_MS = 30
CASES = {
    "with the plugin": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
    "turned off": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "MINDSPEED_CHUNK_DISABLE": "1"},
    "without": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21)
    runs = parser.parse_args().runs
    names = list(CASES)
    times = {name: [] for name in names}
    for round_ in range(-1, runs):  # one round to warm the disk cache
        for name in names[round_ % 3 :] + names[: round_ % 3]:
            measured = import_torch(CASES[name])
            if round_ >= 0:
                times[name].append(measured)
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in times.items()}
    print(f"import torch, medians of {runs} runs    processor ms    clock ms")
    for name, (processor, clock) in medians.items():
        print(f"{name:<34}{processor:12.1f}{clock:12.1f}")
    for name in names[:2]:
        processor, clock = (
            statistics.median(mine[column] - base[column] for mine, base in zip(times[name], times["without"]))
            for column in (0, 1)
        )
        print(f"{name + ' - without, by round':<34}{processor:+12.1f}{clock:+12.1f}")
        if name == names[0]:
            cost = processor
    print(f"bound: {BOUND_MS} ms: {'kept' if cost <= BOUND_MS else 'broken'}")
    return int(cost > BOUND_MS)


def import_torch(variables):
    """Milliseconds of processor time and on the clock of a fresh process."""
    environment = {**os.environ, **variables}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1e3 * processor, 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
