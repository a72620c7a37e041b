"""One question of one submission, graded: the answer runs in a sandbox, the cases are judged here."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from labkit.errors import LabError, PlanError
from labkit.exercise import Case, Exercise, Observation, Result, mark
from labkit.grade.limits import Exceeded, Limits, Watch
from labkit.grade.sandbox import Box, Sandbox
from labkit.trial import Answer, arena

__all__ = ["grade"]

ARENA = (sys.executable, "-m", "labkit.trial.arena")
NUM_RANKS = 4
NUM_STARTS = 2
_DEFAULT = Limits()
_ENDED = "the lab that ran the answer was ended from inside: by the answer, or by something that it started."


class _Forged(Exception):
    """What came out of the sandbox is not what the arena writes."""


class _NotStarted(Exception):
    """The ranks did not come up: no fault of the answer, which was not run."""


def grade(
    exercise: Exercise,
    answer: Answer,
    *,
    seed: int,
    sandbox: Sandbox,
    limits: Limits = _DEFAULT,
    notes: Sequence[str] = (),
) -> Result:
    """Try an answer on fresh ranks in a sandbox and mark it; safe in several threads at once.

    Args:
        exercise: the question.
        answer: cells that define the answer; without any, nothing is started.
        seed: draws the hidden cases.
        sandbox: where it runs.
        limits: what it may use.
        notes: remarks that the result carries along.

    Raises:
        LabError: ranks cannot be started on this machine, tried twice. That says nothing of the answer.
    """
    began_s = time.monotonic()
    cases = exercise.cases(seed)
    absent = [name for name in answer.names if not any(name in source for _, source in answer.cells)]
    if absent:
        return mark(exercise, cases, [Observation.missing(absent)] * len(cases), notes)
    seen = _observe(answer, cases, sandbox, limits)
    return replace(mark(exercise, cases, seen, notes), seconds=time.monotonic() - began_s)


def _observe(answer: Answer, cases: Sequence[Case], sandbox: Sandbox, limits: Limits) -> list[Observation]:
    job = arena.job(
        answer,
        num_ranks=max(NUM_RANKS, *(1 + rank for case in cases for rank in case.members)),
        case_s=limits.case_s,
        start_s=limits.start_s,
        limits=limits.for_system(sandbox.num_threads_beside()),
    )
    why = ""
    for _ in range(NUM_STARTS):
        with sandbox.run(ARENA, job) as box:
            try:
                return _follow(box, cases, limits)
            except _NotStarted as error:
                why = str(error)
    raise LabError(f"ranks could not be started to try an answer, {NUM_STARTS} times: {why}")


def _follow(box: Box, cases: Sequence[Case], limits: Limits) -> list[Observation]:
    """One observation for each case, however it ends."""
    watch = Watch(box, limits, arena.MAX_LINE_BYTES)
    _await_start(box, watch, limits)
    question_s = limits.question_s * max(case.patience for case in cases)
    deadline = time.monotonic() + question_s
    seen: list[Observation] = []
    try:
        while len(seen) < len(cases):
            box.tell(arena.case_line(cases[len(seen)]))  # only now: the ones before must not know it
            line = watch.line(deadline)
            if line is None:
                return _cut(seen, cases, Observation(outcome="lost", message=_ENDED))
            seen.append(_read(line, len(seen), cases[len(seen)]))
    except TimeoutError:
        message = f"all cases together did not finish within {question_s:g} s."
        return _cut(seen, cases, Observation(outcome="timeout", message=message))
    except Exceeded as error:
        return _cut(seen, cases, Observation(outcome="lost", message=str(error)))
    except _Forged as error:  # nothing that it said before can be believed either
        message = (
            f"what came out of the sandbox is not what the lab writes there ({error}): the answer tampered with it."
        )
        return _cut([], cases, Observation(outcome="lost", message=message))
    return seen


def _await_start(box: Box, watch: Watch, limits: Limits) -> None:
    try:
        line = watch.line(time.monotonic() + limits.start_s)
        told = json.loads(line) if line is not None else {"failed": box.complaint() or "it ended without a word"}
    except TimeoutError as error:
        raise _NotStarted(f"they were not up within {limits.start_s:g} s.") from error
    except (Exceeded, ValueError) as error:
        raise _NotStarted(str(error)) from error
    if told != {"ready": True}:
        raise _NotStarted(str(told.get("failed", told)))


def _cut(seen: Sequence[Observation], cases: Sequence[Case], end: Observation) -> list[Observation]:
    """What was seen stands; the case that ran has this end, and those after it were not tried any more."""
    rest = len(cases) - len(seen) - 1
    return [*seen, end, *[replace(end, message=f"not tried any more: {end.message}")] * rest]


def _read(line: bytes, index: int, case: Case) -> Observation:
    """Read one line that may have been written by anybody."""
    try:
        told = json.loads(line)
        if b"\\u" in line:  # half a character cannot be written into a report
            json.dumps(told, ensure_ascii=False).encode()
        if not isinstance(told, dict) or set(told) != {"index", "observation"}:
            raise _Forged("a line that is no observation")
        if type(told["index"]) is not int or told["index"] != index:
            raise _Forged(f"case {str(told['index'])[:20]} where case {index} was due")
        seen = Observation.from_plain(told["observation"])
    except PlanError as error:
        raise _Forged(str(error).rstrip(".")) from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise _Forged(f"a line that cannot be read, {type(error).__name__}") from error
    if any(one.rank not in case.members for one in seen.waits):
        raise _Forged("a rank that does not exist waits")
    return seen
