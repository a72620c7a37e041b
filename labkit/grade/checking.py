"""`labkit.grade.check`: what an answer does on live ranks, told on a card; never an exception."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from labkit import checks
from labkit.cluster import Ranks
from labkit.cluster.checks import check_timeout, shown
from labkit.errors import ClusterError, LabError, PlanError, ranks_text, text_of
from labkit.exercise import Case, Exercise, Observation, Result, mark
from labkit.grade import own_ranks
from labkit.grade.card import Checked, State
from labkit.grade.handed_in import answers_of
from labkit.trial import Answer, observe

__all__ = ["check"]

TIMEOUT_S = 5.0
# Ranks that are about to finish are worth a moment; a run that goes on is not waited for.
BUSY_S = 1.0
POLL_S = 0.02

# How often an answer to each question failed in this kernel: the further hint comes with the second time.
_failures: Counter[str] = Counter()


def check(
    question: str, *answers: Callable[..., Any], ranks: Ranks | None = None, timeout_s: float = TIMEOUT_S
) -> Checked:
    """Try an answer on live ranks and show what it did.

    The visible cases run from small to large, up to the first that fails. An answer that hangs is cut off, and says
    where each rank waits; the ranks are free and whole afterwards. Never raises: whatever is wrong is on the card.

    Args:
        question: its number, such as "06.1".
        *answers: the function that answers it. Of several, those that are not given are looked up beside it.
        ranks: ranks to use; None: four of the lab's own, started with the first check and kept for the next.
        timeout_s: the most that one case may take.

    Returns:
        A `Checked`: all fields of a `Result`, such as `.passed` and `.message`, shown as a card.
    """
    try:
        return _check(question, answers, ranks, timeout_s)
    except KeyboardInterrupt:
        return _stopped_short(question, "stopped", "stopped before the verdict. The ranks are free again.")
    except LabError as error:
        return _stopped_short(question, "error", text_of(error))
    except BaseException as error:  # a check must not end a notebook that runs from top to bottom
        what = f"{type(error).__name__}: {text_of(error)}".rstrip(":. ")
        text = f"the check itself failed ({what}), and says nothing about the answer. Restart the kernel and try again."
        return _stopped_short(question, "error", text)


def _check(question: str, given: tuple[Any, ...], lent: Ranks | None, timeout_s: float) -> Checked:
    timeout_s = check_timeout(timeout_s)
    exercise = _exercise(question)
    functions = answers_of(exercise, given)
    if missing := [name for name in exercise.answers if name not in functions]:
        seen = Observation.missing(missing, f": run {'the cell of it' if len(missing) == 1 else 'their cells'}")
        cases = _visible(exercise, own_ranks.NUM_RANKS)
        return _checked(exercise, mark(exercise, cases[:1], [seen]), len(cases), ())
    ranks, freed = (own_ranks.ready(), ()) if lent is None else _idle(lent)
    cases = _visible(exercise, len(ranks))
    token = ranks.token
    answer = Answer(names=exercise.answers, functions=functions)
    result = _first_failure(exercise, cases, answer, ranks, timeout_s)
    rebuilt = lent is not None and ranks.token != token
    return _checked(exercise, result, len(cases), _notes(result, cases, freed, rebuilt=rebuilt))


def _first_failure(
    exercise: Exercise, cases: tuple[Case, ...], answer: Answer, ranks: Ranks, timeout_s: float
) -> Result:
    """Try the cases up to the first that fails."""
    seen: list[Observation] = []
    for case, observation in zip(cases, observe(ranks, answer, cases, timeout_s=timeout_s), strict=False):
        seen.append(observation)
        if not mark(exercise, [case], [observation]).passed:
            break
    return mark(exercise, cases[: len(seen)], seen)


def _checked(exercise: Exercise, result: Result, num_cases: int, notes: tuple[str, ...]) -> Checked:
    state: State = "passed" if result.passed else "error" if result.status in ("error", "crashed") else "not yet"
    if result.status not in ("full", "unsolved", "missing"):
        _failures[exercise.question] += 1
    fields = {one.name: getattr(result, one.name) for one in dataclasses.fields(Result)}
    fields["notes"] = (*result.notes, *notes)
    return Checked(**fields, state=state, num_cases=num_cases, num_failures=_failures[exercise.question])


def _stopped_short(question: Any, state: State, message: str) -> Checked:
    """A card without a verdict on the answer."""
    name = question if isinstance(question, str) else shown(question)
    return Checked(question=name, title="", status="error", score=0, max_score=0, message=message, state=state)


def _exercise(question: Any) -> Exercise:
    if not isinstance(question, str):
        kind = type(question).__name__
        known = ", ".join(checks.QUESTIONS)
        raise PlanError(f"question {shown(question)} is of type {kind}: its number is a text, one of {known}.")
    return checks.exercise(question)


def _visible(exercise: Exercise, num_ranks: int) -> tuple[Case, ...]:
    visible = [case for case in exercise.cases(0) if not case.hidden]
    fitting = tuple(case for case in visible if max(case.members) < num_ranks)
    if not fitting:
        least = min(max(case.members) for case in visible) + 1
        raise ClusterError(
            f"{num_ranks} rank{'s are' if num_ranks != 1 else ' is'} up, and the smallest case of {exercise.question} "
            f"needs {least}: a group has as many members as ranks. Start {least} ranks, or leave ranks= out."
        )
    return fitting


def _idle(ranks: Any) -> tuple[Ranks, tuple[str, ...]]:
    """The learner's ranks, once nothing else runs on them, and the calls that were ended for that.

    A call that nobody waits for any more is ended: a learner's try that hangs must not keep its check from saying why.
    """
    if not isinstance(ranks, Ranks):
        raise PlanError(
            f"ranks={shown(ranks)} is of type {type(ranks).__name__}: what lk.cluster.start gave is needed. "
            "Use ranks=ranks, or leave it out: check then starts ranks of its own."
        )
    deadline = time.monotonic() + BUSY_S
    freed: tuple[str, ...] = ()
    while busy := _busy(ranks):
        if (left := ranks.left_over()) and left == ranks.under_way():
            ranks.interrupt()
            freed = tuple(dict.fromkeys([*freed, *left]))
            deadline = time.monotonic() + BUSY_S
            continue
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{' and '.join(busy)} {'is' if len(busy) == 1 else 'are'} still going on these ranks: a rank runs one "
                "call at a time. Wait for it, end it (run.stop() or ranks.interrupt()), or leave ranks= out: check "
                "then uses ranks of its own."
            )
        time.sleep(POLL_S)
    return ranks, freed


def _busy(ranks: Ranks) -> list[str]:
    """What runs on the ranks.

    Raises:
        ClusterError: they were stopped, or some cannot be used as they are.
    """
    states = ranks.status()
    for state, fix in (("lost", "restart"), ("paused", "resume")):
        if bad := [one.rank for one in states if one.state == state]:
            what = "gone" if state == "lost" else state
            raise ClusterError(
                f"{ranks_text(bad)} of {len(ranks)} {'is' if len(bad) == 1 else 'are'} {what}: every rank takes part "
                f"in making a group. Use {'; '.join(f'ranks.{fix}({rank})' for rank in bad)}."
            )
    names = [one.doing for one in states if one.state in ("running", "waiting")]
    return list(dict.fromkeys([*ranks.under_way(), *names]))


def _notes(result: Result, cases: Sequence[Case], freed: tuple[str, ...], *, rebuilt: bool) -> tuple[str, ...]:
    notes = []
    if freed:
        notes.append(
            f"{' and '.join(freed)} {'was' if len(freed) == 1 else 'were'} still going on although nobody waited any "
            "more, and ended by the check: a group or mesh of your own is to be made once more."
        )
    if result.status == "crashed":
        notes.append("the lost rank has a new process: what it held is gone.")
    if rebuilt and _was_broken_off(result, len(cases[len(result.cases) - 1].members)):
        notes.append("the ranks have new process groups: a group or mesh of your own is to be made once more.")
    return tuple(notes)


def _was_broken_off(result: Result, num_members: int) -> bool:
    """Whether the last case left ranks behind: it hung, lost one, or raised on some of its members only."""
    failed = result.first_failure
    if failed is None:
        return False
    on_all = failed.message.endswith(f" (and {num_members - 1} more).")
    return failed.outcome in ("timeout", "lost") or (failed.outcome == "raised" and not on_all)
