"""Checks a MindSpeed-MM yaml with rules: what is wrong, what is risky, what is wasteful. Imports no host."""

from __future__ import annotations

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.lint import rules_batch, rules_keys, rules_mbs, rules_model, rules_moe
from mindspeed_chunk.lint.document import Document, Unreadable
from mindspeed_chunk.lint.rule import Finding, Subject

RULES = (*rules_keys.RULES, *rules_model.RULES, *rules_moe.RULES, *rules_batch.RULES, *rules_mbs.RULES)
# A yaml without any of them is for another trainer of the host, or for none.
FSDP2_SECTIONS = ("parallel", "features", "training")


def check(document: Document, world: int | None = None, devices_per_node: int = 8) -> list[Finding]:
    """The findings of all rules, by line. Raises Unreadable for another kind of yaml, or a value of a wrong type."""
    if not any(section in document.data for section in FSDP2_SECTIONS):
        raise Unreadable(
            f"{document.name}: not a yaml of MindSpeed-MM's FSDP2 trainer, which has at least one of the sections "
            f"{', '.join(FSDP2_SECTIONS)}; nothing was checked"
        )
    try:
        subject = Subject(document, world, devices_per_node)
    except Unreadable:
        raise
    except ConfigError as error:
        raise Unreadable(f"{document.name}:{document.line(error.path)}: {error}") from None
    findings: dict[str, Finding] = {}
    for rule in RULES:
        for problem, edits, item in rule.find(subject):
            line = document.line(problem.path, item)
            # if several rules find the same, the first one reports it
            findings.setdefault(str(problem), Finding(rule.id, rule.severity, problem.path, line, str(problem), edits))
    return sorted(findings.values(), key=lambda finding: finding.line)
