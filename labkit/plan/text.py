"""A plan as a small table, in text and HTML."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.plan.plan import Plan

__all__ = ["html_table", "table_rows", "text_summary"]

COLUMNS = ("rank", "dp", "tp", "pp", "layers", "parameters")

_MOST_ROWS = 16


def table_rows(plan: "Plan") -> list[Sequence[str]]:
    """Return a row for each rank; past 16 ranks the first 15 and the last, with a gap between."""
    size = plan.world_size
    shown: list[int | None] = list(range(size)) if size <= _MOST_ROWS else [*range(_MOST_ROWS - 1), None, size - 1]
    return [("…",) * len(COLUMNS) if rank is None else _row(plan, rank) for rank in shown]


def text_summary(plan: "Plan") -> str:
    """Return the plan as an aligned text table under one line that names it."""
    rows = [COLUMNS, *table_rows(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([str(plan), *lines])


def html_table(plan: "Plan") -> str:
    """Return the plan as an HTML table with the same rows as `text_summary`."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in table_rows(plan))
    return f"<table><caption>{plan}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(plan: "Plan", rank: int) -> Sequence[str]:
    place = plan.placement(rank)
    spans = [plan.layers(stage) for stage in plan.stages(rank)]
    layers = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    names = (str(rank), str(place.dp_rank), str(place.tp_rank), str(place.pp_rank))
    return (*names, layers, f"{plan.num_parameters(rank):,}")
