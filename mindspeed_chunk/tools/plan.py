"""Chooses the numbers of a run before it starts: layout, memory, traffic and time of a model on a number of devices.

    mindspeed-chunk plan --model 35b --nodes 4 --devices-per-node 16 --device a3 --html plan.html
    mindspeed-chunk plan CONFIG.yaml --nodes 4 --devices-per-node 16 --device a3

Reads a transformers config folder or takes a built-in model, and goes through the settings of MindSpeed-MM's FSDP2 back
end. Prints what it recommends, why, the next best ones, the tables behind it, and the yaml. With CONFIG.yaml, first the
memory and the time of that yaml as it is. Formulas: docs/planner.md.
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
from mindspeed_chunk.known_devices import ALIASES, DEVICES
from mindspeed_chunk.output import console, terminal
from mindspeed_chunk.planner import given, tables
from mindspeed_chunk.planner.compare.recipes import RECIPES
from mindspeed_chunk.planner.device import load_device
from mindspeed_chunk.planner.given import Given
from mindspeed_chunk.planner.model import BUILT_IN, load_model
from mindspeed_chunk.planner.page import page
from mindspeed_chunk.planner.precision import DEFAULT_RECIPE
from mindspeed_chunk.planner.recommend import Only
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
    "ep": (1, _MOST_DEVICES),
    "ulysses": (1, _MOST_DEVICES),
    "micro_batch": (1, _MOST),
    "num_chunks": (1, _MOST),
    "reserve": (0, 0.99),
}
_DEFAULTS = {"sequence": 4096, "precision": DEFAULT_RECIPE, "chunk_loss": 1024}
_OF_A_YAML = ("sequence", "global_batch", "precision", "chunk_loss", "freeze_vision")


def main() -> int:
    """0: a recommendation, or a yaml that fits; 1: nothing fits, or the yaml does not; 2: a wrong input."""
    options = _parser().parse_args()
    try:
        yours = _given(options) if options.config else None
        only = Only(options.ep, options.ulysses, options.micro_batch, options.num_chunks)
        report = make_report(yours.job if yours else _job(options), yours, only)
        if options.html:
            files.write(Path(options.html), page(report), "--html")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    if options.json:
        print(json.dumps(report))
    else:
        print_report(report, console(), everything=options.all)
    return 0 if report.get("given", report["recommendation"])["fits"] else 1


def print_report(report: dict[str, Any], screen: Console, *, everything: bool) -> None:
    """The recommendation, its reasons and yaml; with `everything` all tables."""
    recommendation = report["recommendation"]
    for line in tables.job_lines(report["job"]):
        screen.print(line, highlight=False)
    if yours := report.get("given"):
        screen.print(f"\nthe yaml: {yours['title']}", highlight=False, markup=False)
        for table in tables.given(yours, report["job"]["budget"]):
            screen.print(terminal(table))
        for sentence in yours["notes"]:
            screen.print(f"- {sentence}", highlight=False, markup=False)
        screen.print()
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
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="a yaml of MindSpeed-MM, estimated as it is")
    parser.add_argument(
        "--model", help=f"a folder with a config.json, or one of {', '.join(BUILT_IN)} (default: that of CONFIG.yaml)"
    )
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--devices-per-node", type=int, required=True, help="number of devices of each node")
    names = f"{', '.join(DEVICES)} (also {', '.join(ALIASES)})"
    parser.add_argument("--device", required=True, help=f"{names}, or a yaml or json file")
    parser.add_argument("--sequence", type=int, help="tokens per sample (default: 4096)")
    parser.add_argument(
        "--global-batch", type=int, help=f"samples per step, of all ranks (default: {_SAMPLES_PER_RANK} per rank)"
    )
    parser.add_argument("--precision", help=f"{', '.join(RECIPES)} (default: {DEFAULT_RECIPE})")
    parser.add_argument(
        "--imbalance", type=float, default=1.0, help="rows of the busiest rank's experts over the mean (default: 1)"
    )
    parser.add_argument(
        "--chunk-loss",
        type=int,
        help="tokens of a micro batch whose logits exist at the same time; 0: all (default: 1024)",
    )
    parser.add_argument("--reserve", type=float, default=0.1, help="share of the memory to leave free (default: 0.1)")
    parser.add_argument(
        "--freeze-vision", action="store_true", help="the vision tower is not trained (model.freeze), and no images run"
    )
    for name, what in (
        ("ep", "expert-parallel size"), ("ulysses", "Ulysses size"), ("micro-batch", "micro batch"),
        ("num-chunks", "number of chunks"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, help=f"recommend only settings with this {what}")
    parser.add_argument("--all", action="store_true", help="every table, not only those of the recommendation")
    parser.add_argument("--json", action="store_true", help="print everything as json instead")
    parser.add_argument("--html", metavar="FILE", help="write one page with tables and charts")
    return parser


def _given(options: argparse.Namespace) -> Given:
    """Raises ConfigError also for an option that says what the yaml says."""
    for name in _OF_A_YAML:
        if (value := getattr(options, name)) is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: not with CONFIG.yaml, which has it; leave one of them out")
    _check(options)
    return given.read(
        Path(options.config),
        nodes=options.nodes,
        devices_per_node=options.devices_per_node,
        device=load_device(options.device),
        model=options.model,
        imbalance=options.imbalance,
        reserve=options.reserve,
    )


def _check(options: argparse.Namespace) -> None:
    check_range(options, _LIMITS)
    if (devices := options.nodes * options.devices_per_node) > _MOST_DEVICES:
        rule = f"{devices} devices, at most {_MOST_DEVICES} can be planned for"
        raise ConfigError.about("--nodes", options.nodes, rule, "plan for a part of them")


def _job(options: argparse.Namespace) -> Job:
    if options.model is None:
        raise ConfigError("--model: is missing; give it, or CONFIG.yaml")
    _check(options)
    for name, value in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.precision not in RECIPES:
        raise ConfigError.about("--precision", options.precision, f"must be one of {', '.join(RECIPES)}", "choose one")
    batch = options.global_batch
    if batch is None:
        batch = _SAMPLES_PER_RANK * options.nodes * options.devices_per_node
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
