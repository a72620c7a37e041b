"""A student's results in the form that Gradescope reads: `/autograder/results/results.json` of an autograder.

The form is described at https://gradescope-autograders.readthedocs.io/en/latest/specs/. Each criterion is one of its
tests, with the points. Who sees what:

- a criterion that visible cases alone decide is `visible`;
- one that hidden cases have a part in is `after_published`: its points would tell early how they ended. Its text names
  the visible cases, and of the hidden ones how many passed;
- the hidden cases that did not pass stand in a test of their own for each question, `hidden` and without points: only
  instructors ever see it.
"""

from typing import Any

from labkit.exercise import CaseResult, Gradebook, Result
from labkit.grade.texts import one_line, plain, shown
from labkit.grade.withholding import for_student, outcome_of

__all__ = ["gradescope"]


def gradescope(gradebook: Gradebook, student: str) -> dict[str, Any]:
    """Return the results of one student as Gradescope wants them."""
    results = list(gradebook.of(student))
    lines = [plain(shown(one)) for one in gradebook.remarks.get(student, ())]
    return {
        "score": gradebook.score(student),
        "execution_time": round(sum(for_student(one).seconds for one in results), 3),
        "output": "\n".join([*lines, *(_line(for_student(one)) for one in results)]),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "stdout_visibility": "hidden",
        "tests": [test for result in results for test in _tests(result)],
    }


def _line(result: Result) -> str:
    return f"{result.question} {result.title}: {result.status}, {result.score} of {result.max_score}. " + plain(
        shown(result.message)
    )


def _tests(result: Result) -> list[dict[str, Any]]:
    """One test for each criterion, one for a question that has none, one for what only instructors see."""
    told = for_student(result)
    tests = [_criterion(told, number, *earned) for number, earned in enumerate(told.earned, start=1)]
    if not tests:
        tests = [
            {
                "name": f"{told.question} {told.title}",
                "number": told.question,
                "score": told.score,
                "max_score": told.max_score,
                "status": "passed" if told.passed else "failed",
                "output": plain(shown(told.message)),
                "visibility": "visible",
            }
        ]
    failed = [one for one in result.cases if one.hidden and not one.passed]
    if failed:
        tests.append(
            {
                "name": f"{result.question} hidden cases that did not pass (instructors only)",
                "number": f"{result.question}.{len(tests) + 1}",
                "status": "failed",
                "output": "\n\n".join(_text(one) for one in failed),
                "visibility": "hidden",
            }
        )
    return tests


def _criterion(told: Result, number: int, name: str, text: str, points: int, most: int) -> dict[str, Any]:
    cases = [one for one in told.cases if one.criterion == name]
    hidden = [one for one in cases if one.hidden]
    lines = [_text(one) for one in cases if not one.hidden]
    if hidden:
        lines.append(f"{sum(one.passed for one in hidden)} of {len(hidden)} hidden cases passed.")
    return {
        "name": f"{told.question} {plain(text)}",
        "number": f"{told.question}.{number}",
        "score": points,
        "max_score": most,
        "status": "passed" if points == most else "failed",
        "output": "\n".join(lines),
        "visibility": "after_published" if hidden else "visible",
    }


def _text(case: CaseResult) -> str:
    """A case in lines: how it ended, and if it did not pass, everything that is known of it."""
    lines = [f"{one_line(case.name)}: {outcome_of(case)}"]
    if not case.passed:
        parts = (("", case.message), ("at", case.where), ("input", case.given), ("got", case.got))
        for label, text in (*parts, ("wanted", case.wanted)):
            if text:
                lines.append(f"  {label}: {shown(text)}" if label else f"  {shown(text)}")
        lines += [f"  rank {rank} {one_line(doing)} {one_line(where)}".rstrip() for rank, doing, where in case.waits]
    return "\n".join(lines)
