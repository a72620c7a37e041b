"""What a prediction scores on one published table, and the tables themselves."""

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from labkit.errors import PlanError

Made = TypeVar("Made")

TABLES = Path(__file__).with_name("published")
"""The project's copies of published tables; each row names its source."""

LEAST, MOST = 1e-9, 1e15
"""Of what tables measure, in any of their units."""


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
    """The rows of a table; none where the folder has no such file. What a short row lacks is empty.

    Raises:
        PlanError: a file that is no text in UTF-8, or no CSV.
    """
    path = tables_dir / f"{table}.csv"
    if not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file, restval=""))
    except (UnicodeDecodeError, csv.Error) as error:
        raise PlanError(
            f"{path.name} cannot be read ({error}): a table is CSV in UTF-8. Save it as such, or take it out."
        ) from None


def tried(predict: Callable[..., Made], row: dict[str, str], *others: object) -> Made | None:
    """What is made of a row; None for one whose columns are not there or do not say enough (a `PlanError` says so)."""
    try:
        return predict(row, *others)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


def positive(text: str) -> float:
    """A measured number.

    Raises:
        ValueError: none, or one that no error can be a share of.

    >>> positive("2.5")
    2.5
    """
    value = float(text)
    if not is_measurement(value):
        raise ValueError(f"{text} was measured: a measurement is between {LEAST:g} and {MOST:g}")
    return value


def is_measurement(value: float) -> bool:
    """Whether an error can be a share of it: no NaN, not 0 or less, not absurdly small or large."""
    return LEAST <= value <= MOST


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
