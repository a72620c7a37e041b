"""The result of one question: status, score, and what a learner needs to go on."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from labkit.exercise.exercise import Idea, Measure

__all__ = ["CaseResult", "Result", "Status"]

Status = Literal["full", "partial", "wrong", "unsolved", "missing", "error", "timeout", "crashed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case of a result: whether it passed, and if not, why, with the input, what came and what was wanted."""

    name: str
    criterion: str
    hidden: bool
    outcome: str
    passed: bool
    message: str = ""
    where: str = ""
    given: str = ""
    got: str = ""
    wanted: str = ""
    idea: str = ""
    waits: tuple[tuple[int, str, str], ...] = ()
    measures: tuple[Measure, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One question as it was marked.

    Attributes:
        question: its number.  title: what it is about.
        status: full, partial, wrong (it ran and is not right), unsolved (the stub is still there), missing (no such
            function), error (it raised), timeout (it was cut off), crashed (a rank's process ended, or a limit was
            hit).
        score: points.  max_score: all points.
        message: one sentence: the first thing that is wrong, or what it is that passed.
        idea: what to think about again, None when all is well.
        cases: every case, in order.
        earned: points by criterion, as (name, text, points, most).
        notes: what the grader noticed on the way, such as an answer that was defined twice.
        seconds: how long it all took.
    """

    question: str
    title: str
    status: Status
    score: int
    max_score: int
    message: str
    idea: Idea | None = None
    cases: tuple[CaseResult, ...] = ()
    earned: tuple[tuple[str, str, int, int], ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return self.status == "full"

    @property
    def first_failure(self) -> CaseResult | None:
        """The smallest case that failed."""
        return next((one for one in self.cases if not one.passed), None)

    def to_plain(self) -> dict[str, Any]:
        """A form that JSON can carry."""
        return asdict(self)
