"""`python -m mindspeed_chunk.standalone.compare BASE.jsonl OTHER.jsonl ... [--plot FILE.png]`: runs side by side.

Reads the metrics files of several runs, prints one table, the first run being what the others are measured against, and
draws the loss curves. A run is named after its file.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mindspeed_chunk import files
from mindspeed_chunk.command import run
from mindspeed_chunk.config import ConfigError

WARM_UP = 2  # iterations that the step time leaves out: the first are slower, and the second is watched


def read_metrics(path):
    """The records of a metrics file, one an iteration. Raises ValueError with one line."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON lines: {error}") from None
    if not records:
        raise ValueError(f"{path}: no iteration in it")
    return records


def largest_difference(losses, base):
    """The largest relative difference of two loss curves over the iterations that both have."""
    return max(abs(loss - other) / abs(other) for loss, other in zip(losses, base))


def traffic(records, kind):
    """Events of a kind per MoE layer: total (forward+recompute+backward), or "-" where nothing was counted."""
    counted = next((record["per_layer"] for record in records if "per_layer" in record), None)
    if counted is None:
        return "-"
    parts = [counted[phase].get(kind, 0) for phase in ("forward", "recompute", "backward")]
    return f"{sum(parts):g} ({'+'.join(f'{part:g}' for part in parts)})"


def table(runs):
    """A rich table of the runs {name: records}; the first is the one compared against."""
    base = [record["loss"] for record in next(iter(runs.values()))]
    result = Table(
        caption="Largest difference: relative, of one iteration's losses, to the first run. Step: median. "
        "All-to-alls, and copies from the device that are waited for: of one MoE layer and micro batch "
        "(forward+recompute+backward). Ranks that share a machine's cores have no wire to hide; on a busy machine, "
        "or over few steps, times are noise.",
        caption_justify="left",
    )
    result.add_column("run", overflow="fold")
    # 80 columns are enough for these
    for heading in ("first\nloss", "last\nloss", "largest\ndifference", "step\n(ms)", "all-to-alls", "device\ncopies"):
        result.add_column(heading, justify="right", no_wrap=True)
    for name, records in runs.items():
        losses = [record["loss"] for record in records]
        times = [record["elapsed_ms"] for record in records]
        result.add_row(
            name,
            f"{losses[0]:.4f}",
            f"{losses[-1]:.4f}",
            f"{largest_difference(losses, base):.1e}" if result.row_count else "-",
            f"{statistics.median(times[WARM_UP:] or times):.0f}",
            traffic(records, "all_to_all"),
            traffic(records, "host_copy"),
        )
    return result


def plot(runs, path):
    """Write the loss curves as a PNG; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, (name, records) in enumerate(runs.items()):
        # thinner from curve to curve, so that equal ones stay visible under each other
        width = 1 + 2.5 * (len(runs) - 1 - number)
        axes.plot([r["iteration"] for r in records], [r["loss"] for r in records], label=name, linewidth=width)
    axes.set(xlabel="iteration", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError.about("--plot", str(path), reason, "give another file") from None
    files.write_figure(path, figure, "--plot")
    pyplot.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m mindspeed_chunk.standalone.compare", description=__doc__)
    parser.add_argument("metrics", type=Path, nargs="+", metavar="METRICS.jsonl")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="where to draw the loss curves")
    arguments = parser.parse_args(argv)
    try:
        runs = {path.stem: read_metrics(path) for path in arguments.metrics}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(table(runs))
    if arguments.plot:
        plot(runs, arguments.plot)
        print(f"loss curves: {arguments.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
