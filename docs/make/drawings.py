"""Draws the pictures of the documents: docs/*.svg.

The simulator computes the timelines from the schedules (`mindspeed_chunk.moe.schedule`); the other two drawings are
laid out by hand below. Each has its own background, and colours for a light and a dark page.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mindspeed_chunk.moe.schedule import Action, Schedule, Timeline, build, parse, simulate

_WIDTH, _MARGIN = 840, 18
_LABEL, _ROW, _GAP = 92, 26, 4
_CHUNKS = 4
_STYLE = """
svg { --page: #ffffff; --ink: #1c2733; --soft: #57606a; --line: #d0d7de; --lane: #f3f5f7; --wait: #d1242f;
      --box: #eef4fb; --edge: #7a9cc0 }
@media (prefers-color-scheme: dark) {
svg { --page: #0d1117; --ink: #e6edf3; --soft: #9aa4af; --line: #30363d; --lane: #161b22; --wait: #ff7b72;
      --box: #16233a; --edge: #4f7cb0 } }
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink) }
.title { font-size: 14px; font-weight: 600 } .soft { fill: var(--soft) } .mono { font-family: ui-monospace, monospace }
.in { fill: #ffffff; text-anchor: middle } .mid { text-anchor: middle } .end { text-anchor: end }
.page { fill: var(--page); stroke: var(--line) } .lane { fill: var(--lane) }
.box { fill: var(--box); stroke: var(--edge) }
.wait { fill: var(--wait); fill-opacity: .12; stroke: var(--wait); stroke-dasharray: 3 2 } .waits { fill: var(--wait) }
.arrow { stroke: var(--soft); stroke-width: 1.5; fill: none; marker-end: url(#tip) } .tip { fill: var(--soft) }
.mark { stroke: var(--soft); stroke-dasharray: 4 3 }
.c0 { fill: #2563a8 } .c1 { fill: #b3541e } .c2 { fill: #2e7d4f } .c3 { fill: #8a3b8f } .other { fill: #55606e }
"""


class Bar(NamedTuple):
    text: str
    start: float
    end: float
    look: str


def _page(height: float, name: str, parts: Iterable[str]) -> str:
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img">',
            f"<title>{html.escape(name)}</title>",
            f"<style>{_STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1:g}" rx="8"/>',
            *parts,
            "</svg>\n",
        )
    )


def _text(x: float, y: float, text: str, look: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{look}">{html.escape(text)}</text>'


def _lane(top: float, label: str, bars: Sequence[Bar], total: float) -> list[str]:
    """One row of bars; `total`: the time that fills the width."""
    left = _MARGIN + _LABEL
    scale = (_WIDTH - _MARGIN - left) / total
    parts = [
        _text(_MARGIN, top + 17, label, "soft"),
        f'<rect class="lane" x="{left}" y="{top:g}" width="{total * scale:g}" height="{_ROW}" rx="3"/>',
    ]
    for bar in bars:
        x, width = left + bar.start * scale, (bar.end - bar.start) * scale
        parts.append(
            f'<rect class="{bar.look}" x="{x + 0.75:g}" y="{top + 1:g}" width="{width - 1.5:g}" '
            f'height="{_ROW - 2}" rx="3"/>'
        )
        if width > 6.4 * len(bar.text):
            look = "waits mid" if bar.look == "wait" else "in"
            parts.append(_text(x + width / 2, top + 17, bar.text, look))
    return parts


def _cost(action: Action, chunks: int) -> float:
    """Experts take as long as their two all-to-alls together, weight gradients as long as that again."""
    return {"D": 1, "E": 2, "C": 1, "W": 2}.get(action.kind, 0) * _CHUNKS / chunks


def _bars(timeline: Timeline, kinds: str, whole: bool) -> list[Bar]:
    """One lane's actions, and between those of the compute lane what it waits for."""
    bars, now = [], 0.0
    for action, start, end in timeline.spans:
        if action.kind not in kinds or start == end:
            continue
        if start > now and "E" in kinds:
            bars.append(Bar("waits", now, start, "wait"))
        bars.append(Bar(action.kind if whole else str(action), start, end, "other" if whole else f"c{action.chunk}"))
        now = end
    if timeline.total > now and "E" in kinds:
        bars.append(Bar("waits", now, timeline.total, "wait"))
    return bars


def _timelines(name: str, cases: Sequence[tuple[str, Schedule]]) -> str:
    found = []
    for title, schedule in cases:
        chunks = 1 + max(action.chunk for action in schedule)
        found.append((title, chunks == 1, simulate(schedule, functools.partial(_cost, chunks=chunks))))
    longest = found[0][2].total
    parts, top = [], _MARGIN
    for title, whole, timeline in found:
        share = f"time {timeline.total / longest:.2f}, hidden {timeline.hidden_share:.0%} of the wire"
        parts += [_text(_MARGIN, top + 13, title, "title"), _text(_WIDTH - _MARGIN, top + 13, share, "soft end")]
        for kinds, label in (("EW", "compute"), ("DC", "wire")):
            top += _ROW + _GAP if label == "wire" else 22
            parts += _lane(top, label, _bars(timeline, kinds, whole), longest)
        top += _ROW + _MARGIN
    parts.append(_text(_MARGIN, top + 8, _KEY[name], "soft"))
    return _page(top + 24, name, parts)


_FORWARD, _BACKWARD = "One MoE layer, forward", "One MoE layer, backward"
_KEY = {
    _FORWARD: "D dispatch, E experts, C combine, with the number of the chunk. Time runs to the right.",
    _BACKWARD: "D gradients dispatched, E gradients of the rows, W of the weights, C combined. Time runs to the right.",
}


def forward() -> str:
    return _timelines(
        _FORWARD,
        (
            ("alltoall: one exchange, the experts, one exchange", build("rolling", 1)),
            ("chunkmoe, pair: two chunks overlap, then the next two", build("pair", _CHUNKS)),
            ("chunkmoe, rolling (default): every chunk overlaps with its neighbours", build("rolling", _CHUNKS)),
        ),
    )


def backward() -> str:
    return _timelines(
        _BACKWARD,
        (
            ("alltoall, through autograd: weight gradients before anything goes back", parse("P0 D0 E0 W0 C0 U0")),
            ("chunkmoe, rolling: weight gradients hide the combine", build("rolling", _CHUNKS, backward=True)),
        ),
    )


def road() -> str:
    """The forward of one layer call on an accelerator, N=2, not to scale: who does what at the same time."""
    lanes = (
        ("host", [Bar("check, count", 0, 2, "other"), Bar("P0", 2, 3.3, "other"), Bar("waits", 3.3, 4.3, "wait"),
                  Bar("D0", 4.3, 5.6, "other"), Bar("filler", 5.6, 7.6, "other"),
                  Bar("P1 D1 E0 C0 E1 C1 U0 U1", 7.6, 12, "other")]),
        ("compute", [Bar("count", 1, 2, "other"), Bar("P0", 2.6, 3.8, "c0"), Bar("filler", 5.8, 7.6, "c2"),
                     Bar("P1", 7.8, 8.6, "c1"), Bar("E0", 8.6, 10.8, "c0"), Bar("E1", 10.8, 13, "c1"),
                     Bar("U0", 13, 13.8, "c0"), Bar("waits", 13.8, 14.6, "wait"), Bar("U1", 14.6, 15.4, "c1")]),
        ("wire", [Bar("plan", 2, 3, "other"), Bar("D0", 5.4, 8, "c0"), Bar("D1", 8.6, 10.4, "c1"),
                  Bar("C0", 10.8, 12.6, "c0"), Bar("C1", 13, 14.6, "c1")]),
        ("side stream", [Bar("counts", 3, 4.3, "other")]),
    )  # fmt: skip
    total, top = 15.4, 44
    left = _MARGIN + _LABEL
    scale = (_WIDTH - _MARGIN - left) / total
    parts = []
    for (label, bars), y in zip(lanes, range(top, 1000, _ROW + _GAP)):
        parts += _lane(y, label, bars, total)
    bottom = top + len(lanes) * (_ROW + _GAP)
    for name, begin, end in (("plan", 0, 2), ("Open", 2, 5.6), ("filler", 5.6, 7.6), ("Close", 7.6, total)):
        x = left + end * scale
        parts.append(_text(left + (begin + end) / 2 * scale, 30, name, "title mid"))
        if end < total:
            parts.append(f'<path class="mark" d="M{x:g} 18V{bottom}"/>')
    parts.append(_text(_MARGIN, bottom + 18, "The host queues; the others run. Not to scale.", "soft"))
    return _page(bottom + 34, "The road of one layer call", parts)


_HOUSE = (
    (
        ("patches/", ("seams of MindSpeed-MM,", "one file each")),
        ("standalone/", ("the embedded trainer,", "for machines without it")),
        ("tools/", ("the command line: doctor,", "lint, plan, bench, trace")),
        ("lint/", ("rules on a yaml", "")),
    ),
    (("planner/", ("memory, traffic and time of a run,", "without torch")),),
    (
        ("moe/", ("one MoE layer in chunks: schedule,", "plan, executor, experts, costs")),
        ("mbs/", ("a block's batch as micro-chunks,", "offload of activations")),
    ),
    (
        ("ops/", ("kernels, one file a back", "end: cpu, cuda, npu")),
        ("dist, device", ("all-to-all, agreement;", "streams, host copies")),
        ("observe", ("what happened, for", "tests, tools and plots")),
        ("config, names", ("what a yaml may say,", "and its wildcards")),
    ),
)


def house() -> str:
    inner, gap, height = _WIDTH - 2 * _MARGIN, 14, 66
    parts, top = [
        f'<rect class="lane" x="{_MARGIN}" y="{_MARGIN}" width="190" height="28" rx="4"/>',
        _text(_MARGIN + 95, _MARGIN + 19, "MindSpeed-MM", "mid"),
        _text(_MARGIN + 206, _MARGIN + 19, "only patches/ touch it; tools/ look at it when asked to", "soft"),
        f'<path class="arrow" d="M{_MARGIN + 95} {_MARGIN + 60}V{_MARGIN + 31}"/>',
    ], _MARGIN + 62  # fmt: skip
    for number, row in enumerate(_HOUSE):
        width = (inner - gap * (len(row) - 1)) / len(row)
        for place, (name, says) in enumerate(row):
            x = _MARGIN + place * (width + gap)
            parts.append(f'<rect class="box" x="{x:g}" y="{top}" width="{width:g}" height="{height}" rx="5"/>')
            parts.append(_text(x + 10, top + 20, name, "title mono"))
            parts += [_text(x + 10, top + 39 + 16 * line, text) for line, text in enumerate(says)]
        top += height
        if number + 1 < len(_HOUSE):
            parts.append(f'<path class="arrow" d="M{_WIDTH / 2:g} {top + 3}V{top + 31}"/>')
            parts.append(_text(_WIDTH / 2 + 12, top + 21, "imports", "soft"))
            top += 34
    parts.append(
        _text(_MARGIN, top + 20, "A part imports from its own row and from rows below, never from above.", "soft")
    )
    return _page(top + 36, "The packages and their imports", parts)


DRAWINGS = {
    "timeline.svg": forward,
    "timeline_backward.svg": backward,
    "road.svg": road,
    "architecture.svg": house,
}
