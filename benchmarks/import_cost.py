"""What the plugin adds to `import torch`: the time that torch waits for its entry point, in fresh processes.

    python benchmarks/import_cost.py [--runs 21]

It measures inside the process, after `import torch` without entry points. The difference of two imports of torch, which
take a hundred times longer, would show mostly the rest of the machine. Exits with 1 if the median is over 20 ms of
processor time; it also prints the time on the clock.
"""

import argparse
import os
import statistics
import subprocess
import sys

BOUND_MS = 20
TIMED = """
import time, torch
from importlib.metadata import entry_points
(point,) = (each for each in entry_points(group="torch.backends") if each.name == "mindspeed_chunk")
processor, clock = time.process_time(), time.perf_counter()
point.load()()
print(time.process_time() - processor, time.perf_counter() - clock)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21, help="number of runs (default: 21)")
    rows = [load_plugin() for _ in range(parser.parse_args().runs)]
    for name, column in zip(("processor", "clock"), zip(*rows)):
        print(f"{name:<9} median {statistics.median(column):6.1f} ms, smallest {min(column):6.1f} ms, {len(rows)} runs")
    kept = statistics.median(row[0] for row in rows) <= BOUND_MS
    print(f"bound of {BOUND_MS} ms: {'kept' if kept else 'broken'}")
    return int(not kept)


def load_plugin():
    """Milliseconds of processor time and on the clock."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    answer = subprocess.run([sys.executable, "-c", TIMED], env=environment, check=True, capture_output=True, text=True)
    return tuple(1e3 * float(word) for word in answer.stdout.split())


if __name__ == "__main__":
    sys.exit(main())
