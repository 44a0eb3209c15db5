"""The output formats of the findings."""

from __future__ import annotations

import collections
import difflib
from collections.abc import Sequence

from mindspeed_chunk import output
from mindspeed_chunk.lint import RULES, edits
from mindspeed_chunk.lint.document import Document
from mindspeed_chunk.lint.rule import NOTE, SEVERITIES, Finding
from mindspeed_chunk.wording import one_line

MAX_EDITS = 50  # each is tried on a copy, which is read again


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if anything but notes was found."""
    return int(any(finding.severity != NOTE for finding in findings))


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    by_severity = collections.Counter(finding.severity for finding in findings)
    return {severity: by_severity[severity] for severity in SEVERITIES}


def lines(name: str, findings: Sequence[Finding]) -> list[str]:
    """One line per finding, and one with the counts."""
    name = one_line(name)
    texts = [f"{name}:{f.line}: {f.severity}: {f.message} [{f.rule}]" for f in findings]
    number = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts(findings).items())
    return [*texts, f"{name}: {number}"]


def as_json(findings: Sequence[Finding]) -> list[dict]:
    return [
        {
            "rule": finding.rule,
            "severity": finding.severity,
            "path": finding.path,
            "line": finding.line,
            "message": finding.message,
            "fixable": bool(finding.edits),
        }
        for finding in findings
    ]


def fixed(document: Document, findings: Sequence[Finding]) -> Document:
    """The document with the first `MAX_EDITS` corrections, and nothing else changed."""
    for edit in [edit for finding in findings for edit in finding.edits][:MAX_EDITS]:
        document = edits.apply(document, edit) or document
    return document


def difference(before: Document, after: Document, name: str) -> str:
    """As `diff -u` shows it; empty if there is none."""
    old, new = (document.text.splitlines(keepends=True) for document in (before, after))
    return "".join(difflib.unified_diff(old, new, before.name, name))


def markdown() -> str:
    """The table of rules, for docs/lint.md."""
    rows = [(f"`{rule.id}`", rule.severity, rule.says) for rule in RULES]
    return output.markdown(("rule", "severity", "what it says"), rows)
