"""Shows on one screen what is installed and whether Chunk MoE can run in MindSpeed-MM here; exits with 1 if not."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mindspeed_chunk import copies
from mindspeed_chunk.output import console
from mindspeed_chunk.output import markdown as table_of
from mindspeed_chunk.tools import environment, host_probe
from mindspeed_chunk.tools.parser import Parser

_TIMEOUT = 600  # seconds; a host on a network drive imports slowly
_PLACEHOLDER = "a placeholder of a package index, or a version without FSDP2; uninstall it and install a checkout"


def main() -> int:
    options = _options()
    if copies.patches() is None:
        print(_without_patches(), file=sys.stderr)
        return 1
    if options.markdown:
        print(markdown())
        return 0
    report = examine(options.config)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return int(not report["ok"])


def _options() -> argparse.Namespace:
    parser = Parser(prog="mindspeed-chunk doctor", description=__doc__)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="one JSON object instead of the screen")
    forms.add_argument(
        "--markdown", action="store_true", help="the table of all patches, from their records; no checks"
    )
    parser.add_argument("--config", metavar="CONFIG.yaml", help="compare HCCL's buffers with a chunk of this run")
    return parser.parse_args()


def markdown() -> str:
    """One row per patch, for `patches/README.md`."""
    from mindspeed_chunk.patches import PATCHES

    return table_of(
        ("patch", "target", "hosts", "expects", "why", "until"),
        [
            (each.name, f"`{each.module}`: {each.target}", each.hosts, each.expects, each.why, each.until)
            for each in PATCHES
        ],
    )


def examine(config: str | None = None) -> dict:
    """The report: what `--json` prints. `ok` is false exactly if there are `reasons`.

    Raises ConfigError about the yaml.
    """
    from mindspeed_chunk.patches import settings
    from mindspeed_chunk.patches.record import APPLIED, READY

    probed = _probe()
    names = (environment.TORCH_AUTOLOAD, *settings.VARIABLES, "NON_MEGATRON")
    set_here = {name: os.environ.get(name) for name in names}
    called = probed.get("autoloaded")  # None: torch cannot be imported
    autoload = bool(called) and not settings.disabled()
    patches = probed.get("patches", [])
    if not autoload:
        for patch in patches:
            patch["state"] = READY if patch["state"] == APPLIED else patch["state"]
    report = {
        "versions": environment.versions(),
        "package": probed.get("package", host_probe.package()),
        "places": probed.get("places", {}),
        "host": probed.get("host"),
        "autoload": {"on": autoload, "torch_calls_it": called, "entry_point": environment.entry_point_installed()},
        "environment": set_here,
        "patches": patches,
        "device": "cpu" if set_here[settings.DEVICE] == "cpu" else probed.get("device"),
        "backends": probed.get("backends", []),
        "chunkmoe": _chunkmoe(probed.get("host")),
    }
    warnings = environment.warnings(os.environ, report["device"], _chunk_bytes(config) if config else 0)
    report["notes"] = [*probed.get("copies", copies.problems()), *_notes(report), *warnings]
    report["reasons"] = _reasons(report, probed)
    report["ok"] = not report["reasons"]
    return report


def _chunk_bytes(config: str) -> int:
    from mindspeed_chunk.lint.document import Document
    from mindspeed_chunk.lint.rule import Subject
    from mindspeed_chunk.lint.rules_moe import chunk_bytes

    return chunk_bytes(Subject(Document.read(Path(config)), None, devices_per_node=8))


def _without_patches() -> str:
    """Why this package has none: it is a part of a checkout, and may come before the installed one."""
    here = Path(copies.core())
    for other in copies.folders():
        if Path(other, "patches").is_dir() and other != str(here):
            way_out = f"take {here.parent} out of PYTHONPATH (an empty entry is the current folder)"
            return f"{here} has no patches and hides {other}, which has: {way_out}, or start elsewhere"
    return f"mindspeed_chunk is on Python's path ({here}) but not installed: pip install it"


def _probe() -> dict:
    """The result of `host_probe`, or `error`: why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        # the stock FSDP2 scripts set it; without it the host imports Megatron
        environ = {"NON_MEGATRON": "true", **os.environ}
        command = [sys.executable, host_probe.__file__, str(result)]
        try:
            ended = subprocess.run(
                command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return {"error": f"the imports of torch and the host did not end in {_TIMEOUT} s"}
        if not result.is_file():
            last = (ended.stderr.strip() or "no message").splitlines()[-1]
            return {"error": f"the imports of torch and the host ended the process with {ended.returncode}: {last}"}
        return json.loads(result.read_text(encoding="utf-8"))


def _chunkmoe(host: dict | None) -> dict:
    """Which one `dispatcher: chunkmoe` runs: "ours", "the host's", or None if neither can."""
    from mindspeed_chunk.patches import settings

    own = host is not None and "chunkmoe" in host["dispatchers"]
    runs = None
    if settings.disabled() or settings.host_dispatcher_chosen():
        runs = "the host's" if own else None
    elif host is not None:
        runs = "ours"
    return {"runs": runs, "host_has_one": own}


def _notes(report: dict) -> list[str]:
    """What prevents nothing, but should be known."""
    notes = []
    places, variables, autoload = report["places"], report["environment"], report["autoload"]
    if autoload["torch_calls_it"] is False:
        notes.append(
            f"torch does not load the plugin ({_why_not_loaded(autoload, variables)}); until it does, start with "
            "torchrun ... -m mindspeed_chunk.launch mindspeed_mm/fsdp/train/trainer.py CONFIG.yaml"
        )
    for package, variable in host_probe.HOMES.items():
        place = places.get(package, {})
        home = os.environ.get(variable)
        if home and place.get("by") != variable:
            notes.append(f"{variable}: {home}: has no folder {package}")
    if report["host"] and variables["NON_MEGATRON"] != "true":
        notes.append("NON_MEGATRON is not true here; the stock FSDP2 scripts set it, and so did this check")
    return notes


def _reasons(report: dict, probed: dict) -> list[str]:
    """Why `dispatcher: chunkmoe` could not run in MindSpeed-MM here, one line each."""
    from mindspeed_chunk.patches import settings
    from mindspeed_chunk.patches.record import DRIFTED

    reasons = [problem for key in ("error", "torch_error") if (problem := probed.get(key))]
    if "torch_error" in probed:
        reasons[-1] = f"torch cannot be imported: {reasons[-1]}"
    reasons += environment.broken_requirements()
    runs = report["chunkmoe"]["runs"]
    if settings.disabled() and runs != "the host's":
        reasons.append(f"{settings.DISABLE}=1 turns the plugin off")
    elif report["host"] and runs is None:
        reasons.append(f"{settings.DISPATCHER}=host, but this host does not have its own chunkmoe; unset it")
    host = probed.get("places", {}).get("mindspeed_mm")
    if host is not None and not host["folders"]:
        reasons.append(_no_host())
    for package, place in probed.get("places", {}).items():
        if place["folders"] and not place["on_path"]:
            reasons.append(f"{package} is found by {place['by']} only: install it, or put {place['by']} on PYTHONPATH")
        if place["folders"] and not place["has_fsdp"]:
            reasons.append(f"{package} at {place['folders'][0]}: no {package}.fsdp in it: {_PLACEHOLDER}")
    device, backends = report["device"], report["backends"]
    # before the problems of the host's modules, which are often its consequence
    if report["host"] and device == "cpu" and report["environment"][settings.DEVICE] != "cpu":
        reasons.append(f"no NPU and no GPU here; {settings.DEVICE}=cpu lets MindSpeed-MM run on the CPU")
    states = [patch for patch in report["patches"] if patch["state"] in (DRIFTED, host_probe.UNKNOWN)]
    # one cause often fails several imports
    by_cause = {patch["detail"].rpartition(" cannot be imported: ")[2]: patch for patch in reversed(states)}
    reasons += [f"{patch['name']}: {patch['state']}: {patch['detail']}" for patch in reversed(by_cause.values())]
    if device is not None and device not in backends and runs != "the host's":
        reasons.append(f"this version has no back end for the device here, {device} (it has: {', '.join(backends)})")
    return reasons


def _no_host() -> str:
    text = "MindSpeed-MM is not found; only the embedded trainer, python -m mindspeed_chunk.standalone, can run here"
    if Path("mindspeed_mm", "fsdp").is_dir():
        return f"{text} (there is a checkout in this folder: pip install -e . in it, or put it on PYTHONPATH)"
    if environment.version_of("mindspeed-mm"):
        return f"{text} (the installed mindspeed-mm is {_PLACEHOLDER})"
    homes = " and ".join(host_probe.HOMES.values())
    return f"{text}; for MindSpeed-MM, install it, or name checkouts by {homes}, and put them on PYTHONPATH"


def _why_not_loaded(autoload: dict, variables: dict[str, str | None]) -> str:
    value = variables[environment.TORCH_AUTOLOAD]
    if value not in (None, "1"):
        return f"{environment.TORCH_AUTOLOAD}={value}"
    if not autoload["entry_point"]:
        return "its entry point is missing: install it again"
    return 'it failed: python -c "import torch" says why'


def show(report: dict) -> None:
    from rich.table import Table
    from rich.text import Text

    from mindspeed_chunk.patches.record import APPLIED, DRIFTED, READY

    # a narrow pipe would cut every path in pieces
    screen = console(width=None if sys.stdout.isatty() else 120, highlight=False)
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, text in _facts(report):
        facts.add_row(Text(name, "bold"), text)
    screen.print(facts)
    colours = {APPLIED: "green", READY: "green", DRIFTED: "red", host_probe.UNKNOWN: "red"}
    if report["patches"]:
        table = Table("patch", "state", "detail", box=None, padding=(0, 2, 0, 0), header_style="bold")
        for patch in report["patches"]:
            table.add_row(patch["name"], Text(patch["state"], colours.get(patch["state"], "")), patch["detail"])
        screen.print()
        screen.print(table)
    screen.print()
    for note in report["notes"]:
        screen.print(f"note: {note}")
    if report["ok"]:
        by_launcher = report["chunkmoe"]["runs"] == "ours" and not report["autoload"]["on"]
        screen.print(f"chunkmoe can run here{', by mindspeed_chunk.launch only' * by_launcher}", style="green")
    else:
        screen.print("chunkmoe could not run here:", style="red")
        for reason in report["reasons"]:
            screen.print(f"  {reason}")


def _facts(report: dict) -> list[tuple[str, str]]:
    """The upper part of the screen."""
    versions, variables, host = report["versions"], report["environment"], report["host"]
    rows = [(name, version or "not found") for name, version in versions.items() if name not in host_probe.HOMES]
    rows += [(f"its {part}", folder or "not found") for part, folder in report["package"].items()]
    for package, name in (("mindspeed", "MindSpeed"), ("mindspeed_mm", "MindSpeed-MM")):
        place = report["places"].get(package, {})
        text = f"{place['folders'][0]} (by {place['by']})" if place.get("folders") else "not found"
        if versions[package] and place.get("by") != host_probe.HOMES[package]:
            text = f"{versions[package]}; {text}"
        if package == "mindspeed_mm" and host:
            text = f"{host['generation']}, by its signatures; {text}"
        rows.append((name, text))
    chunkmoe = report["chunkmoe"]
    own = "the host has its own, MINDSPEED_CHUNK_DISPATCHER=host runs it" if chunkmoe["host_has_one"] else ""
    rows += [
        ("autoload", "on" if report["autoload"]["on"] else "off"),
        (
            "switches",
            ", ".join(f"{name}={value}" for name, value in variables.items() if value is not None) or "none set",
        ),
        ("chunkmoe", "; ".join(filter(None, (f"runs {chunkmoe['runs'] or 'none'}", own)))),
        (
            "device",
            f"{report['device'] or 'unknown'}; back ends of this version: {', '.join(report['backends']) or '-'}",
        ),
    ]
    if host:
        wrapper = {
            "none": "not wrapped by the host",
            "in its source": "wrapped process-wide by the host once it shards experts: asynchronous calls wait at once",
            "applied": "wrapped process-wide by the host: asynchronous calls wait at once",
        }
        rows.append(("all_reduce", wrapper[host["all_reduce_wrapper"]]))
    return rows
