"""`python -m mindspeed_chunk.standalone.compare BASE.jsonl OTHER.jsonl ... [--plot FILE.png]`: runs side by side.

Reads the metrics files of several runs, prints one table that compares the others with the first run, and draws the
loss curves. A run is named after its file.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from mindspeed_chunk import files
from mindspeed_chunk.command import USER_ERROR, run
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.output import Table, console, drawable, terminal
from mindspeed_chunk.tools.parser import Parser
from mindspeed_chunk.wording import one_line

WARM_UP = 2  # the step time leaves out these iterations: the first are slower, and in the second traffic is counted
Record = dict[str, Any]  # of one iteration
Runs = dict[str, list[Record]]  # by name
PHASES = ("forward", "recompute", "backward")
_WAY_OUT = "give a file that the trainer wrote to standalone.metrics_path"


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics file, one per iteration. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:  # no UTF-8, no path
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; {_WAY_OUT}") from None
    if not lines:
        raise ConfigError(f"{path}: it has no iteration; {_WAY_OUT}")
    return [_record(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1)]


def _record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError.about(where, line, f"not JSON lines: {error}", _WAY_OUT) from None
    if not isinstance(record, dict):
        raise ConfigError.about(where, record, "must be an object", _WAY_OUT)
    for key in ("iteration", "loss", "elapsed_ms"):
        if not _is_number(record.get(key)):
            raise ConfigError.about(f"{where}: {key}", record.get(key), "must be a number", _WAY_OUT)
    if not _is_counted(record.get("per_layer", dict.fromkeys(PHASES, {}))):
        rule = f"must have numbers for {', '.join(PHASES)}"
        raise ConfigError.about(f"{where}: per_layer", record["per_layer"], rule, _WAY_OUT)
    return record


def _is_number(value: object) -> bool:
    """Whether it is a number to compute with; a loss may be nan."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def _is_counted(value: object) -> bool:
    counts = [value.get(phase) for phase in PHASES] if isinstance(value, dict) else [None]
    return all(isinstance(count, dict) and all(map(_is_number, count.values())) for count in counts)


def largest_difference(losses: list[float], base: list[float]) -> float:
    """The largest relative difference of two loss curves over the iterations that both have.

    Infinite if a loss of `base` alone is 0; nan if one of the two is, or if that of `base` alone is infinite.
    """
    differences = [0.0 if loss == other else math.inf if other == 0 else abs(loss - other) / abs(other)
             for loss, other in zip(losses, base)]  # fmt: skip
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def traffic(records: list[Record], kind: str) -> str:
    """Events of a kind per MoE layer: total (forward+recompute+backward), or "-" if nothing was counted."""
    counted = next((record["per_layer"] for record in records if "per_layer" in record), None)
    if counted is None:
        return "-"
    parts = [counted[phase].get(kind, 0) for phase in PHASES]
    return f"{sum(parts):g} ({'+'.join(f'{part:g}' for part in parts)})"


def table(runs: Runs) -> Table:
    """The table of the runs; the others are compared with the first."""
    base = [record["loss"] for record in next(iter(runs.values()))]
    rows: list[tuple[str, ...]] = []
    for name, records in runs.items():
        losses = [record["loss"] for record in records]
        times = [record["elapsed_ms"] for record in records]
        rows.append(
            (
                one_line(name),
                f"{losses[0]:.4f}",
                f"{losses[-1]:.4f}",
                f"{largest_difference(losses, base):.1e}" if rows else "-",
                f"{statistics.median(times[WARM_UP:] or times):.0f}",
                traffic(records, "all_to_all"),
                traffic(records, "host_copy"),
            )
        )
    return Table(
        "",
        ("run", "first loss", "last loss", "largest difference", "step (ms)", "all-to-alls", "device copies"),
        rows,
        wrapped=["run"],
        note="Largest difference: relative difference of one iteration's loss from the first run. Step: median. "
        "All-to-alls, and copies from the device that the host waits for: per MoE layer and micro batch "
        "(forward+recompute+backward). Ranks that share a machine's cores have no communication to hide; on a busy "
        "machine, or over few steps, times are noise.",
    )


def names(paths: list[Path]) -> dict[str, Path]:
    """{name: path} of the runs: the file's name without its ending, or the whole path if two names are equal."""
    stems = [path.stem for path in paths]
    return {path.stem if stems.count(path.stem) == 1 else str(path): path for path in paths}


def plot(runs: Runs, path: Path) -> None:
    """Write the loss curves as a PNG; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        rule = "matplotlib cannot be imported"
        raise ConfigError.about("--plot", str(path), rule, "pip install 'mindspeed_chunk[tools]'") from None

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, (name, records) in enumerate(runs.items()):
        # each curve is thinner than the one before, so that equal curves stay visible
        width = 1 + 2.5 * (len(runs) - 1 - number)
        axes.plot(
            [r["iteration"] for r in records], [r["loss"] for r in records], label=drawable(name), linewidth=width
        )
    axes.set(xlabel="iteration", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError.about("--plot", str(path), reason, "give another file") from None
    files.write_figure(path, figure, "--plot")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m mindspeed_chunk.standalone.compare", description=__doc__)
    parser.add_argument("metrics", type=Path, nargs="+", metavar="METRICS.jsonl", help="of each run")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="where to draw the loss curves")
    arguments = parser.parse_args(argv)
    try:
        runs = {name: read_metrics(path) for name, path in names(arguments.metrics).items()}
        console().print(terminal(table(runs)))
        if arguments.plot:
            plot(runs, arguments.plot)
            print(f"loss curves: {arguments.plot}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
