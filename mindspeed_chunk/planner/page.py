"""The planner's report as one page: it loads nothing, is light or dark, and fits large and small screens."""

from __future__ import annotations

from html import escape
from typing import Any

from mindspeed_chunk.output import markup
from mindspeed_chunk.output import page as whole_page
from mindspeed_chunk.planner import tables
from mindspeed_chunk.planner.charts import legend, line_chart, stacked_bar
from mindspeed_chunk.planner.numbers import fixed
from mindspeed_chunk.planner.tables import GB

_STYLE = """
:root { --back: #ffffff; --text: #1c2430; --soft: #5b6675; --edge: #d5dbe3; --panel: #f5f7fa; --mark: #b00020;
  --c0: #3366cc; --c1: #2f8f5b; --c2: #b07a00; --c3: #8a4fbf; --c4: #c8553d; --c5: #2a8c9c; --c6: #7a6f52;
  --c7: #aa3377; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --text: #e6eaf0; --soft: #9aa6b5; --edge: #343c48;
  --panel: #1c222b; --mark: #ff6b81; --c0: #7aa2f7; --c1: #5fc48d; --c2: #e0b050; --c3: #bb8ae8; --c4: #ef8a72;
  --c5: #5fc3d3; --c6: #b9ac8a; --c7: #e07bb4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 16px; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 4px; } h2 { font-size: 1.15rem; margin: 32px 0 8px; }
p, li { max-width: 75ch; } .soft { color: var(--soft); font-size: .9rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px; }
.panel { background: var(--panel); border: 1px solid var(--edge); border-radius: 8px; padding: 12px 16px;
  min-width: 0; }
.panel h2 { margin-top: 0; }
.row { margin: 10px 0; } .row b { font-weight: 600; } .row span { float: right; padding-left: 8px; }
svg.bar { display: block; width: 100%; height: 18px; border-radius: 3px; background: var(--edge); }
svg.lines { width: 100%; max-width: 560px; } svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--edge); } polyline { fill: none; stroke-width: 2; } .mark { fill: var(--mark); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 8px 0; padding: 0;
  font-size: .85rem; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: 5px 8px; border-bottom: 1px solid var(--edge); vertical-align: top; }
pre { background: var(--panel); border: 1px solid var(--edge); border-radius: 8px; padding: 12px;
  white-space: pre-wrap; }
@media (max-width: 700px) { thead { display: none; } tr { display: block; border-bottom: 1px solid var(--edge);
  padding: 6px 0; } td { display: flex; justify-content: space-between; gap: 12px; border: 0; padding: 2px 0; }
  td::before { content: attr(data-label); color: var(--soft); flex: none; max-width: 50%; } }
"""


def page(report: dict[str, Any]) -> str:
    """The whole page as text."""
    job = report["job"]
    title, *lines = tables.job_lines(job)
    shown = [tables.settings(report["recommendation"]), tables.layouts(report["layouts"], wide=True)]
    body = [
        f"<h1>Plan: {escape(title)}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in lines),
        _given(report),
        _recommendation(report["recommendation"]),
        '<div class="charts">',
        _memory_panel(report),
        _panel("Time of a step", _bars(report, "seconds", 1, "s", 3)),
        _chunks_panel(report),
        "</div>",
        *map(markup, (*shown, *tables.details(report))),
        _yaml(report),
        f'<p class="soft">Sources: {escape("; ".join([job["model_source"], *job["device_sources"]]))}</p>',
    ]
    return whole_page(f"Plan: {title}", _colours() + _STYLE, "".join(body))


def _colours() -> str:
    return "".join(
        f".c{n} {{ fill: var(--c{n}); background: var(--c{n}); }} .s{n} {{ stroke: var(--c{n}); }} " for n in range(8)
    )


def _given(report: dict[str, Any]) -> str:
    """The estimate of a yaml as it is, if there is one."""
    if (estimate := report.get("given")) is None:
        return ""
    notes = "".join(f"<li>{escape(sentence)}</li>" for sentence in estimate["notes"])
    shown = "".join(map(markup, tables.given(estimate, report["job"]["budget"])))
    return f"<h2>The yaml: {escape(estimate['title'])}</h2><ul>{notes}</ul>{shown}"


def _recommendation(recommendation: dict[str, Any]) -> str:
    heading = "Recommended" if recommendation["fits"] else "Nothing fits; the least memory has"
    why = "".join(f"<li>{escape(sentence)}</li>" for sentence in recommendation["why"])
    return f"<h2>{heading}: {escape(_chosen(recommendation)['title'])}</h2><ul>{why}</ul>"


def _chosen(recommendation: dict[str, Any]) -> dict[str, Any]:
    return recommendation["best"] or recommendation["least_memory"]


def _drawn(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Layouts with a name short enough for a bar."""
    return [
        (each["title"].split(",")[0] + " (recommended)" * (each["role"] == "recommended"), each)
        for each in report["layouts"]
        if "problem" not in each
    ]


def _memory_panel(report: dict[str, Any]) -> str:
    job, note = report["job"], '<p class="soft">The line is what may be used.</p>'
    bars = _bars(report, "memory", GB, "GB", 1, least=job["memory"] / GB, mark=job["budget"] / GB)
    return _panel("Memory of a rank", bars, note)


def _bars(
    report: dict[str, Any],
    of: str,
    scale: float,
    unit: str,
    digits: int,
    *,
    least: float = 0,
    mark: float | None = None,
) -> str:
    """A bar for each layout; all are drawn against the longest one, or `least`."""
    drawn = [(name, {part: value / scale for part, value in each[of].items()}) for name, each in _drawn(report)]
    names = list(dict.fromkeys(part for _, parts in drawn for part in parts))
    longest = max(least, *(sum(parts.values()) for _, parts in drawn))
    rows = []
    for name, parts in drawn:
        total = f"{fixed(sum(parts.values()), digits)} {unit}"
        bar = stacked_bar({part: parts.get(part, 0.0) for part in names}, longest, unit, f"{name}: {total}", mark)
        rows.append(f'<div class="row"><span>{escape(total)}</span><b>{escape(name)}</b>{bar}</div>')
    return legend(names) + "".join(rows)


def _chunks_panel(report: dict[str, Any]) -> str:
    keep = _chosen(report["recommendation"])["setting"]["keep"]
    lines: dict[str, dict[int, float]] = {}
    for each in report["chunks"]:
        if each["keep"] == keep:
            lines.setdefault(each["schedule"], {})[each["num_chunks"]] = each["exposed"] * 1e3
    chart = line_chart(lines, "number of chunks N", "exposed all-to-all, ms")
    heading = f"Exposed all-to-all of one MoE layer, EP={report['chunks'][0]['ep']}"
    note = '<p class="soft">ms, forward and backward of one pass.</p>'
    return _panel(heading, legend(list(lines)), chart, note)


def _panel(heading: str, *parts: str) -> str:
    return f'<section class="panel"><h2>{escape(heading)}</h2>{"".join(parts)}</section>'


def _yaml(report: dict[str, Any]) -> str:
    if not report["yaml"]:
        return ""
    return f"<h2>For the yaml of MindSpeed-MM</h2><pre>{escape(report['yaml'])}</pre>"
