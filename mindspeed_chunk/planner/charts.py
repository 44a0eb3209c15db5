"""Charts as SVG for the page: stacked bars and one line chart. Colours are CSS classes `c0`, `c1`, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = 8
# of the line chart, in units of the drawing; narrow, so that letters keep their size on a phone
_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 34


def legend(names: Sequence[str]) -> str:
    """The colours of parts, in the order in which bars have them."""
    items = (f'<li><i class="c{n % COLOURS}"></i>{escape(name)}</li>' for n, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def stacked_bar(parts: Mapping[str, float], longest: float, unit: str, label: str, mark: float | None = None) -> str:
    """One bar of `parts`, drawn against `longest`; `mark` is a line across, such as a limit.

    Args:
        label: what the bar says, for readers who do not see it.
    """
    rects, left = [], 0.0
    for n, (name, value) in enumerate(parts.items()):
        width = 100 * value / longest
        rects.append(
            f'<rect class="c{n % COLOURS}" x="{left:.3f}" y="0" width="{width:.3f}" height="10">'
            f"<title>{escape(name)}: {_short(value)} {escape(unit)}</title></rect>"
        )
        left += width
    if mark is not None:
        rects.append(f'<rect class="mark" x="{min(100 * mark / longest, 99.6):.3f}" y="0" width="0.4" height="10"/>')
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(rects)}</svg>"
    )


def line_chart(lines: Mapping[str, Mapping[int, float]], x_label: str, y_label: str) -> str:
    """Values against a few integers, drawn at equal distances."""
    xs = sorted({x for points in lines.values() for x in points})
    largest = max((value for points in lines.values() for value in points.values()), default=0.0) or 1.0
    across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: int, value: float) -> tuple[float, float]:
        return _LEFT + across * xs.index(x) / max(1, len(xs) - 1), _TOP + up * (1 - value / largest)

    drawn = []
    for part in (0, 0.25, 0.5, 0.75, 1):
        y = _TOP + up * (1 - part)
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{_short(largest * part)}</text>')
    for x in xs:
        drawn.append(f'<text x="{at(x, 0)[0]:.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{x}</text>')
    for n, (name, points) in enumerate(lines.items()):
        places = [at(x, points[x]) for x in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(f'<polyline class="s{n % COLOURS}" points="{path}"/>')
        for (left, top), key in zip(places, sorted(points)):
            hint = f"{escape(name)}, {key}: {_short(points[key])}"
            drawn.append(
                f'<circle class="c{n % COLOURS}" cx="{left:.1f}" cy="{top:.1f}" r="3.5"><title>{hint}</title></circle>'
            )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(f'<text x="{middle}" y="{_HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>')
    label = escape(f"{y_label} against {x_label}")
    return f'<svg class="lines" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
