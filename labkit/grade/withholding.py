"""What a student may see of a result: of hidden cases no more than their criterion and how they ended.

A message, a place, a measured number or a time of a hidden case may carry its input, also on purpose: an answer can
raise what it was given. So all of it is left out; the class's page and `results.json`, the teacher's, have it.
"""

from dataclasses import replace

from labkit.exercise import CaseResult, Result

__all__ = ["OUTCOMES", "for_student", "outcome_of"]

# How a case that did not pass ended, in words.
OUTCOMES = {
    "returned": "wrong",
    "raised": "raised an error",
    "timeout": "cut off by the time limit",
    "lost": "a rank ended",
    "unsolved": "not solved yet",
    "missing": "no such function",
    "skipped": "not tried",
}


def outcome_of(case: CaseResult) -> str:
    """How a case ended, in words."""
    return "passed" if case.passed else OUTCOMES.get(case.outcome, "not passed")


def for_student(result: Result) -> Result:
    """Return the result with every hidden case reduced to criterion and outcome."""
    numbers = {id(one): number for number, one in enumerate((one for one in result.cases if one.hidden), start=1)}
    failed = result.first_failure
    message = result.message
    if failed is not None and failed.hidden:
        wanted = dict(earned[:2] for earned in result.earned).get(failed.criterion, failed.criterion)
        message = f"Every visible case passed, but a hidden one did not ({outcome_of(failed)}). It looks at: {wanted}"
    return replace(
        result,
        message=message,
        seconds=sum(one.seconds for one in result.cases if not one.hidden) if numbers else result.seconds,
        cases=tuple(_reduced(one, numbers[id(one)]) if one.hidden else one for one in result.cases),
    )


def _reduced(case: CaseResult, number: int) -> CaseResult:
    return CaseResult(
        name=f"hidden case {number}", criterion=case.criterion, hidden=True, outcome=case.outcome, passed=case.passed
    )
