"""Cases of an exercise run on live ranks: each ends within its time, and the ranks are whole again after it."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.cluster import Call, Ranks
from labkit.errors import Failure, RankError, RankLost, ranks_text
from labkit.exercise import Case, Observation
from labkit.trial.waiting import waits_of

__all__ = ["Answer", "observe"]

ATTEMPT = "labkit.rank.trials.attempt:attempt"
# After so many cases that hung or lost a rank, the rest would do the same, at the same price.
MAX_BROKEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a learner handed in: functions of this notebook, or cells whose text defines them.

    Attributes:
        names: the functions that the exercise asks for.
        functions: them, as far as they are here.
        cells: name and source of cells that define them on the ranks, and never here.
    """

    names: tuple[str, ...]
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    cells: tuple[tuple[str, str], ...] = ()


def observe(ranks: Ranks, answer: Answer, cases: Iterable[Case], *, timeout_s: float) -> Iterator[Observation]:
    """Try an answer case by case; yields one observation for each, whatever the answer does.

    Args:
        ranks: live ranks, idle; enough for the members of every case. They are idle again after each case: waiting
            ranks are freed, those that cannot be freed or that ended are restarted.
        answer: what to try.
        cases: what to try it on.
        timeout_s: the most that one case may take.

    Raises:
        ClusterError: the ranks themselves broke.
    """
    num_broken = 0
    for case in cases:
        if num_broken == MAX_BROKEN:
            yield Observation(outcome="skipped", message=f"not tried: {MAX_BROKEN} cases before it hung or crashed.")
            continue
        began_s = time.monotonic()
        seen = _observe(ranks, answer, case, timeout_s)
        num_broken += seen.outcome in ("timeout", "lost")
        yield replace(seen, seconds=time.monotonic() - began_s)


def _observe(ranks: Ranks, answer: Answer, case: Case, timeout_s: float) -> Observation:
    call = ranks.run(
        ATTEMPT,
        block=False,
        functions=dict(answer.functions),
        cells=answer.cells,
        names=answer.names,
        trial=case.trial,
        members=case.members,
        inputs=dict(case.inputs),
    )
    try:
        if not call.wait(timeout_s):
            return _cut_off(ranks, answer, case, call, timeout_s)
        return _returned(call.result(), case)
    except RankLost as error:
        for rank in error.lost:
            ranks.restart(rank)
        return Observation(outcome="lost", message=_ended(error))
    except RankError as error:
        ranks.interrupt(force=True)
        return _raised(error)


def _cut_off(ranks: Ranks, answer: Answer, case: Case, call: Call, timeout_s: float) -> Observation:
    late = [rank for rank in call.pending() if rank in case.members]
    waits = waits_of(ranks.stacks(late), late, dict(answer.cells))
    ranks.interrupt(force=True)
    message = f"{ranks_text(late)} did not finish within {timeout_s:g} s."
    return Observation(outcome="timeout", message=message, waits=waits)


def _returned(texts: list[str | None], case: Case) -> Observation:
    by_rank = [json.loads(texts[rank] or "{}") for rank in case.members]
    missing = sorted({name for told in by_rank for name in told.get("missing", ())})
    if missing:
        return Observation(outcome="missing", message=f"{' and '.join(missing)} is not defined.")
    return Observation(outcome="returned", values=tuple(told.get("value") for told in by_rank))


def _raised(error: RankError) -> Observation:
    rank, failure = min(error.failures.items())
    if failure.type == "NotImplementedError":
        return Observation(outcome="unsolved", message=failure.message or "not written yet.")
    others = len(error.failures) - 1
    on = f"rank {rank}" if not others else f"rank {rank} (and {others} more)"
    return Observation(outcome="raised", message=f"{failure} on {on}.", where=_where(failure))


def _where(failure: Failure) -> str:
    """The line of the answer that raised; "" when it was not one of its lines."""
    place, colon, line = failure.where.rpartition(":")
    if place.endswith(".py") or not failure.where:
        return ""
    return f"{place}, line {line}" if colon and line.isdigit() else failure.where


def _ended(error: RankLost) -> str:
    how = f"killed by {error.signal}" if error.signal else "ended from inside"
    return f"the process of {ranks_text(error.lost)} was {how}."
