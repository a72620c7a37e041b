"""The page docs/layouts.md, which says what runs: `python -m labkit.plan.combinations docs/layouts.md`.

It is made from `build` itself: every combination of the fields is tried.
"""

import itertools
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache

from labkit.errors import PlanError
from labkit.plan.build import build
from labkit.spec import Layout, Model
from labkit.spec.layout import ENGINES, OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES

__all__ = ["Combination", "page", "refused", "supported"]

MODEL = Model(num_layers=16, d_model=64, num_heads=8, vocab_size=256, seq_len=64)
DP = 4
ONE_STAGE_PER_RANK = ("1f1b", "gpipe")

FIELDS: dict[str, tuple[str, ...]] = {
    "engine": ENGINES,
    "zero": ("0", "1", "2", "3"),
    "shards": ("all of dp", "reshard", "no_reshard", "hybrid"),
    "tp": ("1", "2", "2 sp"),
    "pp": ("1", "2"),
    "schedule": SCHEDULES,
    "precision": PRECISIONS,
    "recompute": RECOMPUTES,
    "offload": OFFLOADS,
}
"""The values of every column; the first is what a layout has that says nothing."""

Combination = tuple[str, ...]
"""A value for each of `FIELDS`."""

_Row = tuple[frozenset[str], ...]


def layout_of(combination: Combination) -> Layout:
    """An example of a combination: dp4, tensor and pipeline parallelism over 2.

    >>> str(layout_of(("auto", "3", "hybrid", "1", "2", "1f1b", "bf16", "none", "none")))
    'dp4 pp2 zero3 1f1b m4 bf16 hybrid2'
    """
    chosen = dict(zip(FIELDS, combination, strict=True))
    schedule = chosen["schedule"]
    return Layout(
        dp=DP,
        tp=int(chosen["tp"][0]),
        pp=int(chosen["pp"]),
        zero_stage=int(chosen["zero"]),
        schedule=schedule,
        num_virtual_stages=1 if schedule in ONE_STAGE_PER_RANK else 2,
        num_microbatches=4,
        precision=chosen["precision"],
        sequence_parallel=chosen["tp"].endswith("sp"),
        recompute=chosen["recompute"],
        offload=chosen["offload"],
        engine=chosen["engine"],
        reshard_after_forward={"reshard": True, "no_reshard": False}.get(chosen["shards"]),
        hybrid=2 if chosen["shards"] == "hybrid" else 1,
    )


@cache
def _outcome(combination: Combination) -> tuple[str, str]:
    """The engine that runs it and "", or "" and why it does not run."""
    try:
        return build(MODEL, layout_of(combination)).engine, ""
    except PlanError as error:
        return "", str(error)


def supported() -> dict[str, list[Combination]]:
    """Every combination that runs, by the engine that runs it."""
    found: dict[str, list[Combination]] = {}
    for combination in itertools.product(*FIELDS.values()):
        engine, _ = _outcome(combination)
        if engine:
            found.setdefault(engine, []).append(combination)
    return found


def refused() -> Iterator[tuple[Layout, str]]:
    """The smallest combination for each reason not to run, and the reason.

    Smallest: with any one of its values left out, it runs, or fails for another reason. So every combination that does
    not run fails for the reason of one of these.
    """
    for combination in itertools.product(*FIELDS.values()):
        engine, why = _outcome(combination)
        if not engine and not any(_facts(smaller) <= _facts(combination) for smaller in _refused_smaller(combination)):
            yield layout_of(combination), why


def _refused_smaller(combination: Combination) -> Iterator[Combination]:
    return (smaller for smaller in _smaller(combination) if not _outcome(smaller)[0])


def _facts(combination: Combination) -> set[str]:
    """What the reason is about, such as `pp=1`; where it names no field, all that stands before its rule."""
    fact = _outcome(combination)[1].partition(": ")[0]
    return set(re.findall(r"\w+=[^\s,]+", fact)) or {fact}


def _smaller(combination: Combination) -> Iterator[Combination]:
    for index, (value, options) in enumerate(zip(combination, FIELDS.values(), strict=True)):
        if value != options[0]:
            yield (*combination[:index], options[0], *combination[index + 1 :])


def merged(combinations: Sequence[Combination]) -> list[_Row]:
    """Rows that together hold exactly these combinations, each row every choice of one value from each of its sets.

    >>> [[sorted(values) for values in row] for row in merged([("a", "x"), ("a", "y"), ("b", "y")])]
    [[['a'], ['x', 'y']], [['b'], ['y']]]
    """
    rows: list[_Row] = [tuple(frozenset([value]) for value in combination) for combination in combinations]
    if not rows:
        return []
    for column in reversed(range(len(rows[0]))):
        groups: dict[_Row, frozenset[str]] = {}
        for row in rows:
            rest = (*row[:column], *row[column + 1 :])
            groups[rest] = groups.get(rest, frozenset()) | row[column]
        rows = [(*rest[:column], values, *rest[column:]) for rest, values in groups.items()]
    return rows


def page() -> str:
    """The page, in Markdown."""
    lines = [
        "# Which layouts run",
        "",
        "Made by `python -m labkit.plan.combinations docs/layouts.md` from `labkit.plan.build` itself, which was asked",
        f"about all {_num_combinations():,} combinations of these values (dp4, tp and pp over 2; a model that every",
        "split divides). A test makes it anew and compares.",
        "",
        "## What runs, and by what",
        "",
        "A row stands for every choice of one value from each of its cells.",
        "",
    ]
    columns = ["runs on", *FIELDS]
    rows = [
        [engine, *(_cell(values, options) for values, options in zip(row, FIELDS.values(), strict=True))]
        for engine, combinations in supported().items()
        for row in merged(combinations)
    ]
    lines += _table(columns, rows)
    lines += [
        "",
        "## What does not run, and why",
        "",
        "The smallest layout for each reason; the reason is what `plan.build` says. Whatever else does not run fails",
        "for one of these reasons.",
        "",
    ]
    lines += _table(["layout", "why not"], [[f"`{layout}`", _markdown(why)] for layout, why in refused()])
    return "\n".join(lines) + "\n"


def _num_combinations() -> int:
    count = 1
    for options in FIELDS.values():
        count *= len(options)
    return count


def _cell(values: frozenset[str], options: Sequence[str]) -> str:
    if len(values) == len(options):
        return "any"
    return ", ".join(value for value in options if value in values)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(page(), encoding="utf-8")
