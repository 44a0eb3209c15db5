"""What commands print and draw holds words of the user, which are no markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_chunk.wording import one_line

if TYPE_CHECKING:
    from rich.console import Console


def console(**keywords: Any) -> Console:
    """A rich console that prints text as it is: no markup, no names of emojis."""
    from rich.console import Console  # doctor --json has no need of it

    return Console(markup=False, emoji=False, **keywords)


def drawable(text: str) -> str:
    """The text for matplotlib, which would read what stands between two dollar signs as a formula."""
    return one_line(text).replace("$", r"\$")
