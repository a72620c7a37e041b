"""Predictions beside published measurements, table by table: step times, bubbles, collectives, memory.

    python -m benchmarks.published [--tables DIR]

Nothing runs but arithmetic. `DIR` holds tables of the same columns as `benchmarks/published/`: rows there are predicted
with constants that were fitted to the project's own copies, one for each device and software. Beside every error stands
that of a constant guess: each stack reaches its median efficiency (or its median, or a line, for what is no time);
"stated" is what `baselines_to_beat.csv` says of such a guess, over rows that are not all here.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import published_memory, published_time
from benchmarks.pairs import json_line
from benchmarks.published_row import TABLES, Row, read
from labkit.errors import PlanError

SCORES: tuple[Callable[[Path], list[Row]], ...] = (published_time.score, published_memory.score)

STATED = "baselines_to_beat"
WHOLE = ("step time", "bubble_rate", "time_us")
"""What the stated baselines are about."""

BARS = {
    ("vtrain_multi_node", "step time"): 12.0,
    ("throughput_memory_bigscience_bloom", "step time"): 12.0,
    ("throughput_mlperf", "step time"): 10.0,
    ("throughput_dgxc_weak_scaling", "step time"): 10.0,
    ("zero_bubble_bubble_rates", "bubble_rate"): 15.0,
    ("zero_bubble_bubble_rates", "pairs in the wrong order"): 0.0,
    ("collectives_nccl", "time_us, median error"): 15.0,
    ("collectives_vtrain_intranode", "time_us, median error"): 15.0,
    **published_memory.BARS,
}
"""Largest errors in percent that count as met."""


def main() -> int:
    """Score all tables; 0 when every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, metavar="DIR", help="default: benchmarks/published")
    parser.add_argument("--pairs", type=int, help="not used")
    tables = parser.parse_args().tables
    if not tables.is_dir():
        parser.error(f"--tables {tables}: no such folder; give one with tables as in {TABLES}")
    try:
        rows = [row for score in SCORES for row in score(tables)]
    except PlanError as error:
        parser.error(f"--tables {tables}: {error}")
    silent = unscored(tables, rows)
    if not rows and not silent:
        parser.error(f"--tables {tables}: no table there has rows and a known name; known are those in {TABLES}")
    _show(tables, rows)
    for table, count in silent.items():
        print(f"{table:36}  no row says enough: columns are those of {TABLES.name}/{table}.csv  (0/{count})")
    met = not silent and all(row.error_pct <= BARS.get((row.table, row.target), row.error_pct) for row in rows)
    lines = [
        {"table": row.table, "what": row.target, "rows": row.rows, "error_pct": round(row.error_pct, 2),
         "baseline_pct": round(row.baseline_pct, 2)}
        for row in rows
    ]  # fmt: skip
    json_line("published", tables=str(tables.name), scores=lines, unscored=list(silent), met=met)
    return 0 if met else 1


def _show(tables: Path, rows: list[Row]) -> None:
    """A line for each score."""
    width = max((len(row.target) for row in rows), default=0)
    stated = {line["table"]: f"{float(line['error_pct']):.1f}%" for line in read(TABLES, STATED)}
    print(f"{'table':36}  {'what':{width}}  {'rows':>9}   error  constant  stated  bar")
    for row in rows:
        bar = BARS.get((row.table, row.target))
        judged = "" if bar is None else f"<= {bar:g}: {'met' if row.error_pct <= bar else 'MISSED'}"
        in_table = len(read(tables, row.table))
        scored = f"{row.rows}/{in_table}" if row.rows <= in_table else str(row.rows)
        guess = stated.get(row.table, "") if row.target in WHOLE else ""
        errors = f"{row.error_pct:5.1f}%  {row.baseline_pct:7.1f}%  {guess:>6}"
        print(f"{row.table:36}  {row.target:{width}}  {scored:>9}  {errors}  {judged}".rstrip())


def unscored(tables: Path, rows: list[Row]) -> dict[str, int]:
    """Tables of a known name that have rows and no score -> how many rows."""
    scored = {row.table for row in rows}
    names = sorted(path.stem for path in TABLES.glob("*.csv") if path.stem not in {*scored, STATED})
    return {name: count for name in names if (count := len(read(tables, name)))}


if __name__ == "__main__":
    sys.exit(main())
