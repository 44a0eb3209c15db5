"""How the planner shows numbers: one above 0 is never shown as 0."""

from __future__ import annotations


def fixed(value: float, digits: int) -> str:
    """With `digits` decimals; a number above 0 that would be shown as 0 gets one significant digit instead."""
    text = f"{value:.{digits}f}"
    return text if float(text) or not value else f"{value:.1g}"


def billions(number: int) -> str:
    """As 35.1e9; a small number as it is."""
    return f"{number / 1e9:.1f}e9" if number >= 10**8 else str(number)
