"""What commands print, draw and write. A table is data, shown on a terminal, on a page and in Markdown.

All of it can hold words of the user, which are no markup.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_chunk.wording import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

Column = tuple[str, str | Callable[[Any], object]]

_WIDTH = 150  # where a wide table goes into a file or a pipe


class Table(NamedTuple):
    """Rows of text.

    Attributes:
        columns: their headings. The first column is aligned to the left, the others to the right.
        wrapped: headings of columns that hold words: to the left, and on several lines where the terminal is narrow.
        note: the text below the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    wrapped: Sequence[str] = ()
    note: str = ""

    @classmethod
    def of(cls, title: str, records: Iterable[Mapping[str, Any]], *columns: Column, **more: Any) -> Table:
        """A row for each of `records`; a column is its heading, and a key or a function that gives the cell."""
        rows = [[str(each[cell] if isinstance(cell, str) else cell(each)) for _, cell in columns] for each in records]
        return cls(title, [heading for heading, _ in columns], rows, **more)


def terminal(table: Table) -> RichTable:
    """For a rich console. Headings have a line per word, and only the `wrapped` columns may be narrowed."""
    from rich import box
    from rich.table import Table as RichTable

    drawn = RichTable(
        title=table.title or None, title_justify="left", caption=table.note or None, caption_justify="left",
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    for number, heading in enumerate(table.columns):
        wraps = heading in table.wrapped
        drawn.add_column(
            heading if wraps else heading.replace(" ", "\n"),
            justify="right" if number and not wraps else "left",
            no_wrap=not wraps,
            overflow="fold",
        )
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def markup(table: Table) -> str:
    """For a page; a cell has its heading as `data-label`, for pages too narrow for a row of headings."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in table.columns)
    rows = (
        "".join(
            f'<td data-label="{html.escape(heading)}">{html.escape(cell)}</td>'
            for heading, cell in zip(table.columns, row)
        )
        for row in table.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    title = f"<h2>{html.escape(table.title[:1].upper() + table.title[1:])}</h2>" if table.title else ""
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(columns), "|---" * len(columns) + "|", *map(line, rows)])


def page(title: str, style: str, body: str) -> str:
    """A whole page, which asks for nothing from anywhere."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def console(**keywords: Any) -> Console:
    """A rich console that prints text as it is: no markup, no names of emojis."""
    from rich.console import Console  # doctor --json has no need of it

    return Console(markup=False, emoji=False, **keywords)


def wide_console() -> Console:
    """The terminal, or a file or pipe with lines long enough for wide tables."""
    here = console()
    return here if here.is_terminal else console(width=_WIDTH)


def drawable(text: str) -> str:
    """The text for matplotlib, which would read what is between two dollar signs as a formula."""
    return one_line(text).replace("$", r"\$")
