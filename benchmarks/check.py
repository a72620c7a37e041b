"""The verdict of `check` on live ranks: the solution of every question, through all of its visible cases.

    python -m benchmarks.check [--pairs N]

A round checks every question once. A right answer is the slowest to check: a wrong one ends at its first failing case.
"""

import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import labkit as lk
from benchmarks.pairs import arguments, json_line, say
from labkit import checks

BAR_S = 3.0
ROUNDS = 5
SOLUTIONS = pathlib.Path(__file__).resolve().parent.parent / "solutions"


def answers(question: str) -> list[Callable[..., Any]]:
    """The functions that the solution's cells define."""
    exercise = checks.exercise(question)
    cells = json.loads((SOLUTIONS / f"{exercise.chapter}.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        solved = cell["metadata"].get("nbgrader", {}).get("solution", False)
        if cell["id"] == "imports" or (solved and cell["id"].startswith(f"q{question.replace('.', '-')}")):
            source = "".join(cell["source"])
            exec(compile(source, f"{exercise.chapter}.ipynb, cell {cell['id']}", "exec"), namespace)
    return [namespace[name] for name in exercise.answers]


def verdict(question: str, functions: list[Callable[..., Any]], ranks: "lk.cluster.Ranks") -> float:
    """Seconds until the card is there.

    Raises:
        RuntimeError: the solution did not pass.
    """
    began = time.perf_counter()
    result = lk.grade.check(question, *functions, ranks=ranks, timeout_s=60.0)
    result._repr_html_()
    seconds = time.perf_counter() - began
    if not result.passed:
        raise RuntimeError(f"the solution of {question} did not pass:\n{result}")
    return seconds


def main() -> int:
    """Check every solution in every round; 0 when each verdict came in time."""
    options = arguments(__doc__, pairs=ROUNDS)
    solutions = {question: answers(question) for question in checks.QUESTIONS}
    seconds: dict[str, list[float]] = {question: [] for question in solutions}
    with lk.cluster.start(4, backend="gloo") as ranks:
        for number in range(options.pairs):
            for question in solutions if number % 2 == 0 else reversed(solutions):
                seconds[question].append(verdict(question, solutions[question], ranks))
            say(f"  round {number + 1}/{options.pairs}: " + ", ".join(f"{q} {t[-1]:.2f} s" for q, t in seconds.items()))
    print(f"check: {options.pairs} rounds, seconds until the verdict on a right answer, on four live ranks")
    print("  question  median  slowest  bar")
    for question, times in seconds.items():
        judged = f"<= {BAR_S:g}: {'met' if max(times) <= BAR_S else 'MISSED'}"
        print(f"  {question:8}  {statistics.median(times):6.2f}  {max(times):7.2f}  {judged}")
    met = all(max(times) <= BAR_S for times in seconds.values())
    rows = {
        question: {"median_s": round(statistics.median(times), 3), "max_s": round(max(times), 3)}
        for question, times in seconds.items()
    }
    json_line("check", rounds=options.pairs, questions=rows, bar_s=BAR_S, met=met)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
