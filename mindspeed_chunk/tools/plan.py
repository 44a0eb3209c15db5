"""Chooses the numbers of a run before it starts: layout, memory, traffic and time of a model on a number of devices.

    mindspeed-chunk plan --model 35b --nodes 8 --devices-per-node 8 --device ascend-910c --html plan.html

Reads a transformers config folder or takes a built-in model, and goes through the settings of MindSpeed-MM's FSDP2 back
end. Prints what it recommends, why, the next best ones, the tables behind it, and the yaml. Formulas: docs/planner.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from mindspeed_chunk import files
from mindspeed_chunk.command import USER_ERROR, run
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.output import console, terminal
from mindspeed_chunk.planner import tables
from mindspeed_chunk.planner.compare.recipes import RECIPES
from mindspeed_chunk.planner.device import DEVICES, load_device
from mindspeed_chunk.planner.model import BUILT_IN, load_model
from mindspeed_chunk.planner.page import page
from mindspeed_chunk.planner.precision import DEFAULT_RECIPE
from mindspeed_chunk.planner.report import make_report
from mindspeed_chunk.planner.setting import Job, check_job
from mindspeed_chunk.tools.parser import Parser, check_range

_SAMPLES_PER_RANK = 4
_MOST_DEVICES = 16384
_MOST = 10**8  # tokens, samples
_LIMITS = {
    "nodes": (1, _MOST_DEVICES),
    "devices_per_node": (1, _MOST_DEVICES),
    "sequence": (1, _MOST),
    "global_batch": (1, _MOST),
    "imbalance": (1, _MOST_DEVICES),
    "chunk_loss": (0, _MOST),
    "reserve": (0, 0.99),
}


def main() -> int:
    """0: a recommendation; 1: nothing fits; 2: wrong arguments, or a model or device that does not exist."""
    options = _parser().parse_args()
    try:
        job = _job(options)
        report = make_report(job)
        if options.html:
            files.write(Path(options.html), page(report), "--html")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    if options.json:
        print(json.dumps(report))
    else:
        print_report(report, console(), everything=options.all)
    return 0 if report["recommendation"]["fits"] else 1


def print_report(report: dict[str, Any], screen: Console, *, everything: bool) -> None:
    """The recommendation, its reasons and yaml; with `everything` all tables."""
    recommendation = report["recommendation"]
    for line in tables.job_lines(report["job"]):
        screen.print(line, highlight=False)
    screen.print(terminal(tables.settings(recommendation)))
    for sentence in recommendation["why"]:
        screen.print(f"- {sentence}", highlight=False)
    screen.print(terminal(tables.layouts(report["layouts"])))
    behind = tables.details(report) if everything else ()
    for table in (*tables.chunks(report["chunks"], everything=everything), *behind):
        screen.print(terminal(table))
    if report["yaml"]:
        screen.print("\nfor the yaml of MindSpeed-MM:\n", highlight=False)
        screen.print(report["yaml"], highlight=False, soft_wrap=True)


def _parser() -> Parser:
    parser = Parser(prog="mindspeed-chunk plan", description=__doc__)
    parser.add_argument("--model", required=True, help=f"a folder with a config.json, or one of {', '.join(BUILT_IN)}")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--devices-per-node", type=int, required=True)
    parser.add_argument("--device", required=True, help=f"{', '.join(DEVICES)}, or a yaml or json file")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens per sample (default: 4096)")
    parser.add_argument(
        "--global-batch", type=int, help=f"samples per step, of all ranks (default: {_SAMPLES_PER_RANK} per rank)"
    )
    parser.add_argument("--precision", default=DEFAULT_RECIPE, help=f"{', '.join(RECIPES)} (default: {DEFAULT_RECIPE})")
    parser.add_argument(
        "--imbalance", type=float, default=1.0, help="rows of the busiest rank's experts over the mean (default: 1)"
    )
    parser.add_argument(
        "--chunk-loss",
        type=int,
        default=1024,
        help="tokens of a micro batch whose logits exist at the same time; 0: all (default: 1024)",
    )
    parser.add_argument("--reserve", type=float, default=0.1, help="share of the memory to leave free (default: 0.1)")
    parser.add_argument(
        "--freeze-vision", action="store_true", help="the vision tower is not trained (model.freeze), and no images run"
    )
    parser.add_argument("--all", action="store_true", help="every table, not only those of the recommendation")
    parser.add_argument("--json", action="store_true", help="print everything as json instead")
    parser.add_argument("--html", metavar="FILE", help="write one page with tables and charts")
    return parser


def _job(options: argparse.Namespace) -> Job:
    check_range(options, _LIMITS)
    if (devices := options.nodes * options.devices_per_node) > _MOST_DEVICES:
        rule = f"{devices} devices, at most {_MOST_DEVICES} can be planned for"
        raise ConfigError.about("--nodes", options.nodes, rule, "plan for a part of them")
    if options.precision not in RECIPES:
        raise ConfigError.about("--precision", options.precision, f"must be one of {', '.join(RECIPES)}", "choose one")
    batch = options.global_batch
    if batch is None:
        batch = _SAMPLES_PER_RANK * devices
    job = Job(
        model=load_model(options.model),
        device=load_device(options.device),
        nodes=options.nodes,
        devices_per_node=options.devices_per_node,
        recipe=RECIPES[options.precision],
        sequence=options.sequence,
        global_batch=batch,
        imbalance=options.imbalance,
        chunk_loss=options.chunk_loss,
        reserve=options.reserve,
        train_vision=not options.freeze_vision,
    )
    check_job(job)
    return job


if __name__ == "__main__":
    sys.exit(run(main))
