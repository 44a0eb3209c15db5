"""A recorded layer call as a page, a picture, and events in Chrome's trace format."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mindspeed_chunk import files
from mindspeed_chunk.moe.schedule import KINDS
from mindspeed_chunk.output import Table, drawable, markup
from mindspeed_chunk.output import page as whole_page
from mindspeed_chunk.tools.trace_record import (
    COMPUTE,
    Recording,
    Slice,
    action_seconds,
    lay_out,
    lay_out_simulated,
    summarise,
)

# one a chunk, in turn; dark enough for white letters
_COLOURS = ("#2563a8", "#b3541e", "#2e7d4f", "#8a3b8f", "#7a6a00", "#00788c", "#a3324a", "#55606e")
_EXPOSED, _OTHER = "#e11d1d", "#b8bec6"
_PAGE_WIDTH, _LABEL_WIDTH, _ROW, _GAP = 1200, 150, 26, 6
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px; padding: 0 1rem; color: #1c2733;
       background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-bottom: .3rem }
table { border-collapse: collapse } th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #dde2e8 }
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto; display: block } svg text { font: 11px system-ui, sans-serif; fill: #1c2733 }
svg text.in { fill: #fff; pointer-events: none; text-anchor: middle } svg rect:hover { opacity: .7 }
.key { display: inline-block; width: .9em; height: .9em; margin: 0 .35em 0 1em; vertical-align: -.1em }
"""


_ACTIONS = "P permute, D dispatch, E experts, C combine, W weight gradients, U unpermute"


class Row(NamedTuple):
    """A lane to draw."""

    title: str
    spans: list[Slice]


def rows(spans: list[Slice], prefix: str = "") -> list[Row]:
    """By lane: compute first, then the wire's."""
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane != COMPUTE, lane))
    return [Row(prefix + lane, [span for span in spans if span.lane == lane]) for lane in lanes]


def _lanes(record: Recording) -> list[Row]:
    """Measured ones, and simulated ones below them."""
    return rows(measured_spans(record)) + rows(simulated_spans(record), "simulated ")


def measured_spans(record: Recording) -> list[Slice]:
    return [span for one in record.passes for span in lay_out(one)]


def simulated_spans(record: Recording) -> list[Slice]:
    return [span for one in record.passes for span in lay_out_simulated(one)]


def colour(span: Slice) -> str:
    """Waiting for rows stands out; a chunk keeps its colour over all actions."""
    if span.exposed:
        return _EXPOSED
    if span.chunk is None or span.kind == "launch":
        return _OTHER
    return _COLOURS[span.chunk % len(_COLOURS)]


def chrome(records: list[Recording]) -> dict:
    """One process a rank, one thread a lane, a counter of chunks; then the simulations, a process each. In microseconds
    from the first rank's begin.
    """
    zero, events = min(record.begin for record in records), []
    for record in records:
        events += _process(2 * record.rank, f"rank {record.rank}", measured_spans(record), zero)
        events += [
            {
                "ph": "C",
                "name": "chunks",
                "pid": 2 * record.rank,
                "ts": 1e6 * (end - zero),
                "args": {"in flight": in_flight, "own buffers": owners},
            }
            for one in record.passes
            for _, end, in_flight, owners in one.actions
        ]
    for record in records:
        events += _process(2 * record.rank + 1, f"rank {record.rank}, simulated", simulated_spans(record), zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(pid: int, name: str, spans: list[Slice], zero: float) -> list[dict]:
    events = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}]
    events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    for tid, row in enumerate(rows(spans)):
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row.title}})
        for span in row.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": "exposed communication" if span.exposed else span.kind,
                    "pid": pid,
                    "tid": tid,
                    "ts": 1e6 * (span.start - zero),
                    "dur": 1e6 * span.length,
                    "args": {} if span.chunk is None else {"chunk": span.chunk},
                }
            )
    return events


def page(title: str, sizes: str, records: list[Recording]) -> str:
    """HTML without a reference to anything outside of it."""
    parts = [f"<h1>{html.escape(title)}</h1><p>{html.escape(sizes)}</p>", markup(summary_table("", records))]
    parts.append(_key(records))
    for record in records:
        parts.append(f"<h2>Rank {record.rank}</h2>{_drawing(record)}")
    return whole_page(title, _STYLE, "".join(parts))


def summary_table(title: str, records: list[Recording]) -> Table:
    """A row for each rank and direction."""
    return Table.of(
        title,
        [{"of": f"{record.rank}, {one.name}", **each._asdict(), "hidden": each.hidden_share}
         for record in records for one in record.passes for each in (summarise(one),)],
        ("rank, direction", "of"),
        ("total", _ms("total")),
        ("compute", _ms("compute")),
        ("on the wire", _ms("communication")),
        ("exposed", _ms("exposed")),
        ("hidden", lambda each: f"{each['hidden']:.0%}"),
        ("plan", _ms("plan")),
        ("simulated", _ms("simulated")),
        ("simulated exposed", _ms("simulated_exposed")),
        note="All times in ms. Exposed: computation waits for rows. Hidden: the share of the time with rows on the "
        "wire that is not exposed. Simulated: the same schedule with the measured costs; launches, and all that is not "
        "an action of the schedule, are free there.",
    )  # fmt: skip


def action_table(records: list[Recording]) -> Table:
    """The time of each kind of action, by rank and direction: D and C on the wire, the others computing."""
    rows = []
    for record in records:
        for one in record.passes:
            seconds = action_seconds(one).values()
            rows.append([f"{record.rank}, {one.name}", *(f"{1e3 * each:.2f}" for each in seconds)])
    return Table("ms by action", ("rank, direction", *KINDS), rows, note=_ACTIONS)


def _ms(key: str) -> Callable[[dict], str]:
    return lambda each: f"{1e3 * each[key]:.2f}"


def _key(records: list[Recording]) -> str:
    chunks = sorted({span.chunk for span in measured_spans(records[0]) if span.chunk is not None})
    named = [(_COLOURS[chunk % len(_COLOURS)], f"chunk {chunk}") for chunk in chunks]
    named += [(_EXPOSED, "exposed communication"), (_OTHER, "launches, plan, rest")]
    marks = "".join(f'<span class="key" style="background: {shade}"></span>{text}' for shade, text in named)
    return f"<p>{marks}</p><p>{_ACTIONS}, each with its chunk. Hold the pointer over a span for its time.</p>"


def _drawing(record: Recording) -> str:
    drawn = _lanes(record)
    begin, end = _extent(drawn, record)
    scale = (_PAGE_WIDTH - _LABEL_WIDTH) / (end - begin)
    height = len(drawn) * (_ROW + _GAP) + 30
    parts = [f'<svg viewBox="0 0 {_PAGE_WIDTH} {height}" role="img">']
    for number, row in enumerate(drawn):
        top = number * (_ROW + _GAP)
        parts.append(f'<text x="0" y="{top + 17}">{html.escape(row.title)}</text>')
        parts += [_box(span, _LABEL_WIDTH + (span.start - begin) * scale, span.length * scale, top, begin)
                  for span in row.spans]  # fmt: skip
    bottom = len(drawn) * (_ROW + _GAP)
    for one in record.passes:
        x = _LABEL_WIDTH + (one.begin - begin) * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom + 10}" stroke="#1c2733" stroke-width="1"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="{bottom + 12}">{one.name}, {1e3 * (one.begin - begin):.1f} ms</text>')
    parts.append(
        f'<text x="{_PAGE_WIDTH}" y="{bottom + 12}" text-anchor="end">{1e3 * (end - begin):.1f} ms</text></svg>'
    )
    return "".join(parts)


def _box(span: Slice, x: float, width: float, top: float, begin: float) -> str:
    told = f"{span.name}: {1e3 * span.length:.3f} ms, from {1e3 * (span.start - begin):.3f} ms"
    box = (
        f'<rect x="{x:.2f}" y="{top}" width="{max(width, 0.4):.2f}" height="{_ROW}" fill="{colour(span)}">'
        f"<title>{html.escape(told)}</title></rect>"
    )
    if width > 7 * len(span.name):
        box += f'<text class="in" x="{x + width / 2:.2f}" y="{top + 17}">{html.escape(span.name)}</text>'
    return box


def _extent(drawn: list[Row], record: Recording) -> tuple[float, float]:
    return record.begin, max(record.passes[-1].end, *(span.end for row in drawn for span in row.spans))


def draw(title: str, record: Recording, path: str) -> None:
    """One rank as a PNG: measured lanes, and simulated ones below them."""
    from matplotlib.figure import Figure

    drawn = _lanes(record)
    begin, end = _extent(drawn, record)
    figure = Figure(figsize=(14, 1.8 + 0.45 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(drawn):
        bars = [(1e3 * (span.start - begin), 1e3 * span.length) for span in row.spans]
        axes.broken_barh(
            bars, (number - 0.4, 0.8), facecolors=list(map(colour, row.spans)), edgecolor="white", linewidth=0.3
        )
        for span, (left, width) in zip(row.spans, bars):
            if width > 4e-3 * 1e3 * (end - begin) * len(span.name):
                axes.text(left + width / 2, number, span.name, color="white", fontsize=7, ha="center", va="center")
    for one in record.passes:
        axes.axvline(1e3 * (one.begin - begin), color="black", linewidth=0.8)
    axes.set_yticks(range(len(drawn)), [row.title for row in drawn])
    axes.invert_yaxis()
    told = "\n".join(
        f"{one.name} {1e3 * each.total:.1f} ms, exposed {1e3 * each.exposed:.1f} ms (red), "
        f"hidden {each.hidden_share:.0%}, simulated {1e3 * each.simulated:.1f} ms"
        for one in record.passes
        for each in (summarise(one),)
    )
    axes.set(xlabel="ms", xlim=(0, 1e3 * (end - begin)), title=f"{drawable(title)}, rank {record.rank}\n{told}")
    axes.title.set_fontsize(10)
    files.write_figure(Path(path), figure, "--out")
