"""Small tables, in text and HTML."""

import html
from collections.abc import Sequence

__all__ = ["html_table", "text_table"]


def text_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table under its title.

    >>> print(text_table("squares", ["x", "x²"], [["2", "4"], ["10", "100"]]))
    squares
     x   x²
     2    4
    10  100
    """
    lines = [columns, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    aligned = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([title, *aligned])


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table of `text_table` as HTML.

    >>> html_table("a", ["x"], [["1"]])
    '<table><caption>a</caption><thead><tr><th>x</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
