"""From what was seen to points: judge each case, add up the criteria, name the status."""

from collections.abc import Sequence
from dataclasses import astuple

from labkit.errors import PlanError, ranks_text
from labkit.exercise.exercise import Case, Exercise, Finding, Idea
from labkit.exercise.observation import MAX_TEXT, Observation
from labkit.exercise.result import CaseResult, Result, Status

__all__ = ["mark"]

_STATUS: dict[str, Status] = {
    "returned": "wrong",
    "raised": "error",
    "timeout": "timeout",
    "lost": "crashed",
    "unsolved": "unsolved",
    "missing": "missing",
}


def mark(
    exercise: Exercise, cases: Sequence[Case], observations: Sequence[Observation], notes: Sequence[str] = ()
) -> Result:
    """Judge what was seen of an answer.

    Args:
        exercise: the question.
        cases: the cases that were tried, in order.
        observations: what was seen, one for each case.
        notes: remarks to carry along.

    Raises:
        PlanError: there is not one observation for each case.
    """
    if len(cases) != len(observations) or not cases:
        raise PlanError(f"{len(observations)} observations of {len(cases)} cases: each case is seen once.")
    results = tuple(_judge(exercise, case, seen) for case, seen in zip(cases, observations, strict=True))
    tried = [one for one in exercise.criteria if any(result.criterion == one.name for result in results)]
    earned = tuple(
        (one.name, one.text, one.points * all(r.passed for r in results if r.criterion == one.name), one.points)
        for one in tried
    )
    score, most = sum(one[2] for one in earned), sum(one[3] for one in earned)
    failed = next((one for one in results if not one.passed), None)
    return Result(
        question=exercise.question,
        title=exercise.title,
        status=_status(score, most, failed),
        score=score,
        max_score=most,
        message=_message(results, failed),
        idea=None if failed is None else _idea(exercise, failed),
        cases=results,
        earned=earned,
        notes=tuple(notes),
        seconds=sum(one.seconds for one in results),
    )


def _judge(exercise: Exercise, case: Case, seen: Observation) -> CaseResult:
    finding = _finding(exercise, case, seen)
    return CaseResult(
        name=case.name,
        criterion=case.criterion,
        hidden=case.hidden,
        outcome=seen.outcome,
        passed=finding.passed,
        message=_cut(finding.message),
        where=seen.where,
        given=_cut(finding.given),
        got=_cut(finding.got),
        wanted=_cut(finding.wanted),
        idea=finding.idea,
        waits=tuple(astuple(one) for one in seen.waits),
        measures=finding.measures,
        seconds=seen.seconds,
    )


def _finding(exercise: Exercise, case: Case, seen: Observation) -> Finding:
    if seen.outcome != "returned":
        return Finding(passed=False, message=seen.message or f"{case.name}: {seen.outcome}.", idea=seen.outcome)
    if len(seen.values) != len(case.members):
        return Finding(
            passed=False, message=f"{len(seen.values)} of {len(case.members)} ranks gave a result: all of them must."
        )
    try:
        return exercise.judge(case, seen.values)
    except Exception as error:  # values that no trial gives: made up by the answer, never the end of a batch
        return Finding(passed=False, message=f"what came back is not what a trial gives ({type(error).__name__}).")


def _cut(text: str) -> str:
    """A judge quotes what came from the answer, however long that is."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."


def _status(score: int, most: int, failed: CaseResult | None) -> Status:
    if failed is None:
        return "full"
    return "partial" if 0 < score < most else _STATUS.get(failed.outcome, "wrong")


def _message(results: Sequence[CaseResult], failed: CaseResult | None) -> str:
    if failed is None:
        count = len(results)
        return f"{count} case{'s' * (count != 1)} passed."
    if failed.waits and not failed.message:
        return f"{ranks_text(one[0] for one in failed.waits)} did not finish."
    return failed.message


def _idea(exercise: Exercise, failed: CaseResult) -> Idea | None:
    return exercise.ideas.get(failed.idea)
