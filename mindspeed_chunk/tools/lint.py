"""Reads a MindSpeed-MM yaml as MindSpeed-MM does and reports what is wrong (error), risky (warning) or wasteful (note).

Exit code: 0 without findings or with notes only, 1 with an error or a warning, 2 if the file cannot be read as a
configuration or the command is wrong. With --fix, too, it is about CONFIG.yaml, not about the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from mindspeed_chunk import files, lint
from mindspeed_chunk.command import run
from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.lint import report, rules_batch
from mindspeed_chunk.lint.document import Document
from mindspeed_chunk.lint.rule import Subject
from mindspeed_chunk.tools.parser import Parser
from mindspeed_chunk.wording import shown

_MOST = 10**6  # ranks, devices
_NEXT_TO_IT = ""  # --fix without a name
UNREADABLE = 2


def main() -> int:
    options = _options()
    if options.markdown:
        print(report.markdown())
        return 0
    try:
        return _lint(options)
    except ConfigError as error:
        if options.json:
            print(json.dumps({"file": options.config, "error": str(error)}, indent=1))
        else:
            print(f"error: {error}", file=sys.stderr)
        return UNREADABLE


def _options() -> argparse.Namespace:
    parser = Parser(prog="mindspeed-chunk lint", description=__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="a yaml of MindSpeed-MM")
    parser.add_argument("--world", type=_count, metavar="N", help="number of ranks of the run; allows more checks")
    parser.add_argument("--devices-per-node", type=_count, metavar="N", default=8,
                        help="devices of a node, or of a supernode with links as fast; default: 8")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--fix",
        metavar="OUT.yaml",
        nargs="?",
        const=_NEXT_TO_IT,
        help="also write a corrected copy and show the difference; without a name: CONFIG.fixed.yaml, next to the file",
    )
    parser.add_argument("--markdown", action="store_true", help="the table of rules, as in docs/lint.md; no checks")
    options = parser.parse_args()
    if options.config is None and not options.markdown:
        parser.error("give CONFIG.yaml")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be an integer >= 1 and <= {_MOST}")
    return int(text)


def _lint(options: argparse.Namespace) -> int:
    document = Document.read(Path(options.config))
    findings = lint.check(document, options.world, options.devices_per_node)
    batch = rules_batch.global_batch(Subject(document, options.world, options.devices_per_node))
    result = {"file": options.config, "findings": report.as_json(findings), "counts": report.counts(findings)}
    if batch is not None:
        result["global_batch"] = batch[0]
    if not options.json:
        print("\n".join(report.lines(options.config, findings)))
        if batch is not None:
            print(f"{options.config}: global batch on {options.world} ranks: {batch[0]} = {batch[1]}")
    if options.fix is not None:
        result["fixed"] = _fix(options, document, findings)
    if options.json:
        print(json.dumps(result, indent=1))
    return report.exit_code(findings)


def _fix(options: argparse.Namespace, document: Document, findings: list) -> str | None:
    """Write the corrected copy. Returns its path; None if there is nothing to correct."""
    given = Path(options.config)
    path = Path(options.fix) if options.fix != _NEXT_TO_IT else given.with_name(f"{given.stem}.fixed{given.suffix}")
    if os.path.abspath(path) != os.path.abspath(given) and _same(path, given):
        rule = f"is {given} through a link, and that file is written only under its own name"
        raise ConfigError.about("--fix", str(path), rule, "give another file")
    made = report.fixed(document, findings)
    difference = report.difference(document, made, str(path))
    if not difference:
        if not options.json:
            print(f"{options.config}: --fix has nothing to correct; no file was written")
        return None
    files.write(path, made.text, "--fix")
    if not options.json:
        print(difference, end="")
        left = lint.check(made, options.world, options.devices_per_node)
        print(report.lines(str(path), left)[-1])
    return str(path)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):  # does not exist, or not a possible file name
        return False


if __name__ == "__main__":
    sys.exit(run(main))
