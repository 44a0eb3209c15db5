"""How a plan shows numbers: what is more than 0 never looks like 0."""

from __future__ import annotations


def fixed(value: float, digits: int) -> str:
    """With so many digits behind the point; what would be shown as 0 and is more, with one digit that counts."""
    text = f"{value:.{digits}f}"
    return text if float(text) or not value else f"{value:.1g}"


def billions(number: int) -> str:
    """As 35.1e9; a small number as it is."""
    return f"{number / 1e9:.1f}e9" if number >= 10**8 else str(number)
