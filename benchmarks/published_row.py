"""What a prediction scores on one published table, and the tables themselves."""

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).with_name("published")
"""The project's copies of published tables; each row names its source."""


class Row(NamedTuple):
    """One quantity of one table.

    Attributes:
        table: file name without its ending.
        target: the predicted column, and of which rows where not of all.
        error_pct: mean of |predicted / measured - 1|, in percent.
        baseline_pct: the same for one constant, the median of the measured (or of their efficiency, where said).
        rows: how many rows are scored.
    """

    table: str
    target: str
    error_pct: float
    baseline_pct: float
    rows: int


def read(tables_dir: Path, table: str) -> list[dict[str, str]]:
    """The rows of a table; none where the folder has no such file."""
    path = tables_dir / f"{table}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def error_pct(predicted: Iterable[float], measured: Iterable[float]) -> float:
    """Mean absolute error in percent of the measured.

    >>> error_pct([1.1, 0.9], [1.0, 1.0])
    10.0
    """
    errors = [abs(guess / true - 1) for guess, true in zip(predicted, measured, strict=True)]
    return round(100 * statistics.fmean(errors), 9)


def constant_pct(measured: Sequence[float], groups: Sequence[object] | None = None) -> float:
    """The error of guessing the median, of all or of each row's group."""
    keys = list(groups) if groups is not None else [None] * len(measured)
    medians = {
        key: statistics.median(true for true, other in zip(measured, keys, strict=True) if other == key) for key in keys
    }
    return error_pct([medians[key] for key in keys], measured)
