"""Interleaved pairs: the only honest way to compare two jobs on a machine that others use too.

Every round runs every job once, in alternating order, so that a slow minute hits all of them. What is reported is
the median over rounds of each job's time divided by the base job's time *of the same round*, beside the same
number for a second copy of the base job: the noise floor.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MIN_PAIRS = 8
FLOOR = "same job again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Times of several jobs over the same rounds.

    Attributes:
        base: the job that the others are divided by.
        seconds: one time per round, by job.
    """

    base: str
    seconds: Mapping[str, Sequence[float]]

    def ratios(self, job: str) -> list[float]:
        """The job's time over the base job's, round by round."""
        return [a / b for a, b in zip(self.seconds[job], self.seconds[self.base], strict=True)]

    def ratio(self, job: str) -> float:
        """The median of the round-by-round ratios."""
        return statistics.median(self.ratios(job))


def arguments(description: str | None, *, pairs: int = MIN_PAIRS, layouts: Sequence[str] = ()) -> argparse.Namespace:
    """Parse `--pairs N` (and, where there are layouts, their names)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pairs", type=int, default=pairs, help=f"interleaved pairs (default {pairs})")
    if layouts:
        parser.add_argument("layouts", nargs="*", metavar="|".join(layouts), help="default: all of them")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs}: at least one pair is needed, {MIN_PAIRS} for a number to quote")
    if unknown := sorted(set(getattr(options, "layouts", [])) - set(layouts)):
        parser.error(f"unknown layouts {', '.join(unknown)}: choose from {', '.join(layouts)}")
    return options


def compare(jobs: Mapping[str, Callable[[], float]], *, base: str, pairs: int) -> Comparison:
    """Run every job once per round, forwards in even rounds and backwards in odd ones.

    Args:
        jobs: each returns its own seconds. `FLOOR` is added: the base job a second time.
        base: the job to divide by.
        pairs: the number of rounds.
    """
    every = {**jobs, FLOOR: jobs[base]}
    seconds: dict[str, list[float]] = {name: [] for name in every}
    for number in range(pairs):
        names = list(every) if number % 2 == 0 else list(reversed(every))
        for name in names:
            gc.collect()
            seconds[name].append(every[name]())
        say(f"  pair {number + 1}/{pairs}: " + ", ".join(f"{n} {seconds[n][-1]:.4g} s" for n in every))
    return Comparison(base=base, seconds=seconds)


def say(text: str) -> None:
    """Tell a person how far it is; the table and the JSON line alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def report(name: str, comparison: Comparison, *, bars: Mapping[str, float]) -> bool:
    """Print the table and the JSON line.

    Args:
        name: the benchmark.
        comparison: the times.
        bars: the largest ratio allowed, by job.

    Returns:
        Whether every bar was met.
    """
    pairs = len(comparison.seconds[comparison.base])
    width = max(len(job) for job in comparison.seconds)
    print(f"{name}: {pairs} interleaved pairs, ratio to {comparison.base!r}")
    print(f"  {'job':{width}}  {'median':>10}  {'ratio':>6}  {'lowest':>6}  {'highest':>7}  bar")
    rows = {}
    for job, seconds in comparison.seconds.items():
        ratios = comparison.ratios(job)
        bar = bars.get(job)
        verdict = "" if bar is None else f"<= {bar:g}: {'met' if comparison.ratio(job) <= bar else 'MISSED'}"
        median = statistics.median(seconds)
        print(
            f"  {job:{width}}  {milliseconds(median):>10}  {comparison.ratio(job):6.3f}  {min(ratios):6.3f}  "
            f"{max(ratios):7.3f}  {verdict}"
        )
        rows[job] = {"median_s": round(median, 6), "ratio": round(comparison.ratio(job), 4), "bar": bar}
    met = all(comparison.ratio(job) <= bar for job, bar in bars.items())
    json_line(name, pairs=pairs, base=comparison.base, jobs=rows, floor=rows[FLOOR]["ratio"], met=met)
    return met


def milliseconds(seconds: float) -> str:
    """A time as people read it.

    >>> milliseconds(0.01234), milliseconds(3.21)
    ('12.34 ms', '3.21 s')
    """
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def json_line(name: str, **values: object) -> None:
    """Print one JSON line: the benchmark, the machine's shape, the values."""
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({"benchmark": name, **machine, **values}), flush=True)
