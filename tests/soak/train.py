"""The embedded trainer with Chunk MoE and ChunkMBS for thousands of steps, routing skewed at random from step to step.

    PYTHONPATH=tests python -m soak.train --steps 2000 --out outputs/soak.json

Three runs of a tiny model with the same data and the same skew: both features with recompute and offload; the plain
`alltoall` without any of them; and a control, half as long, `alltoall` with noise of the size of rounding on its
gradients. In fp32 curves of equal runs part ways once a router's near tie falls the other way, so the curves alone
cannot tell a mistake from rounding. What is checked:

* *from the same weights*, every few steps of the `alltoall` run: loss and gradients of both features there against
  those of `alltoall`, to rounding. Probes where a near tie fell the other way are counted, and few;
* *the curves*: means over windows of steps are no further from `alltoall`'s than a few times what the control's are;
* *memory*: resident bytes, and bytes of live tensors, after a warm-up: no rank's slope over the steps is significantly
  above a small bound.

Exits with 1 where one of them is not so.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import fmean

from launcher import HANG_S, run_ranks
from mindspeed_chunk.tools.environment import versions
from soak.trained import KINDS, Plan, soak, write_model

# relative, fp32: loss and norm of the gradients' difference, from the same weights
BOUND_LOSS = 1e-5
BOUND_GRADIENT = 1e-5
# share of the probes in which a near tie may fall the other way
BOUND_PARTED = 0.1
# of the windows' distances, root mean square, to the control's
BOUND_WINDOWS = 5.0
# bytes a step, over which the slope must be by 3 of its standard errors
BOUND_RESIDENT = 1024.0
BOUND_TENSORS = 64.0
SIGNIFICANT = 3.0
WARM_UP = 0.25
SECONDS_A_STEP = 5.0


def slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: the slope of y over x and its standard error."""
    mean_x, mean_y = (fmean(column) for column in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    found = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    left = sum((y - mean_y - found * (x - mean_x)) ** 2 for x, y in points)
    return found, math.sqrt(left / max(1, len(points) - 2) / spread)


def growth(samples: list[tuple[int, int, int]], column: int, bound: float) -> dict[str, float | bool]:
    """The slope of a column of memory samples after the warm-up, in bytes a step, and whether it is within `bound`."""
    first = WARM_UP * samples[-1][0]
    points = [(sample[0], sample[column]) for sample in samples if sample[0] >= first]
    found, error = slope(points)
    ok = found - SIGNIFICANT * error <= bound
    return {"slope": found, "error": error, "first": points[0][1], "last": points[-1][1], "ok": ok}


def windows(losses: list[float], base: list[float], size: int) -> list[float]:
    """Relative difference of the mean loss of each window of `size` steps that both have."""
    starts = range(0, min(len(losses), len(base)) - size + 1, size)
    return [fmean(losses[start : start + size]) / fmean(base[start : start + size]) - 1 for start in starts]


def judge(told: list[dict], window: int) -> dict:
    """The record of what was seen, from what each rank told, with "ok" for each check."""
    first, base = told[0], told[0]["alltoall"]["losses"]
    probes = first["probes"]
    same = [probe for probe in probes if not probe["parted"]]
    from_weights = {
        "probes": len(probes),
        "parted": len(probes) - len(same),
        **{name: max((probe[name] for probe in same), default=math.inf) for name in ("loss", *KINDS)},
    }
    from_weights["ok"] = (
        from_weights["loss"] <= BOUND_LOSS
        and all(from_weights[kind] <= BOUND_GRADIENT for kind in KINDS)
        and from_weights["parted"] <= BOUND_PARTED * len(probes)
    )
    distances = {name: windows(first[name]["losses"], base, window) for name in ("chunked", "control")}
    # over the windows that the control has: distances grow as the loss falls
    common = len(distances["control"])
    spread = {name: math.sqrt(fmean(d * d for d in found[:common])) for name, found in distances.items()}
    curves = {
        "window": window,
        "common": common,
        "largest": {name: max(map(abs, found)) for name, found in distances.items()},
        "root mean square": spread,
        "mean": {name: fmean(found) for name, found in distances.items()},
        "loss": {name: (fmean(losses[:window]), fmean(losses[-window:])) for name, losses in _losses(first).items()},
        "ok": spread["chunked"] <= BOUND_WINDOWS * spread["control"],
    }
    memory = {
        name: {
            "resident": [growth(rank[name]["memory"], 1, BOUND_RESIDENT) for rank in told],
            "tensors": [growth(rank[name]["memory"], 2, BOUND_TENSORS) for rank in told],
        }
        for name in ("chunked", "alltoall", "control")
    }
    memory["ok"] = all(rank["ok"] for kind in memory["chunked"].values() for rank in kind)
    return {"from the same weights": from_weights, "curves": curves, "memory": memory}


def _losses(told: dict) -> dict[str, list[float]]:
    return {name: told[name]["losses"] for name in ("chunked", "alltoall", "control")}


def report(record: dict) -> None:
    same, curves, memory = record["from the same weights"], record["curves"], record["memory"]
    off = ", ".join(f"{kind} {same[kind]:.1e}" for kind in KINDS)
    print(
        f"from the same weights, {same['probes']} probes, {same['parted']} of them parted by a near tie: loss "
        f"{same['loss']:.1e}, gradients of {off}: {_verdict(same)}"
    )
    for name in ("chunked", "control"):
        print(
            f"curve, windows of {curves['window']} steps, {name} to alltoall: largest {curves['largest'][name]:.1e}, "
            f"mean {curves['mean'][name]:+.1e}, root mean square of the first {curves['common']} "
            f"{curves['root mean square'][name]:.1e}"
        )
    print(f"curves: {_verdict(curves)}")
    for name in ("chunked", "alltoall", "control"):
        for kind, ranks in memory[name].items():
            slopes = ", ".join(f"{rank['slope']:.0f} +- {rank['error']:.0f}" for rank in ranks)
            print(f"memory, {name}, {kind}: {slopes} bytes a step on the ranks")
    print(f"memory: {_verdict(memory)}")


def _verdict(part: dict) -> str:
    return "ok" if part["ok"] else "NOT OK"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m soak.train", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=2000, help="of a run; the control has half as many (default: 2000)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="a multiple of 2 (default: 4)")
    parser.add_argument("--probe", type=int, default=10, help="steps between probes (default: 10)")
    parser.add_argument("--window", type=int, default=50, help="steps of a window (default: 50)")
    parser.add_argument("--sample", type=int, default=20, help="steps between looks at the memory (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the skew (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the record")
    options = parser.parse_args(argv)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        plan = Plan(write_model(Path(folder)), options.steps, options.probe, options.sample, options.seed)
        timeout = HANG_S + SECONDS_A_STEP * options.steps
        told = run_ranks(soak, options.ranks, plan, timeout=timeout, fill_nan=False)
    record = judge(told, options.window)
    seconds = time.monotonic() - start
    report(record)
    print(f"{options.steps} steps on {options.ranks} ranks, {seconds:.0f} s")
    if options.out:
        about = {"date": date.today().isoformat(), "versions": versions(), "options": vars(options) | {"out": None}}
        raw = {"losses": _losses(told[0]), "probes": told[0]["probes"]}
        raw["memory"] = {name: [rank[name]["memory"] for rank in told] for name in ("chunked", "alltoall", "control")}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**about, "seconds": seconds, **record, "raw": raw}), encoding="utf-8")
    return 0 if all(part["ok"] for part in record.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
