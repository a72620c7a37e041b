"""The results of a class: who answered what, and how each answer was marked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from labkit.errors import PlanError
from labkit.exercise.result import Result

__all__ = ["Gradebook"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradebook:
    """Results by student and question; every student has a result for every question.

    Attributes:
        students: names of their folders or files, in order.
        questions: question numbers, in order.
        results: by (student, question).
        remarks: what is to be said of a whole submission, by student, such as a notebook that cannot be read.
        notes: what is to be said of the class as a whole, such as files that are no student's.
        sandbox: in words, behind what the answers ran.
        seed: the seed that drew the hidden cases.
    """

    students: tuple[str, ...]
    questions: tuple[str, ...]
    results: Mapping[tuple[str, str], Result]
    remarks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sandbox: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = {(student, question) for student in self.students for question in self.questions}
        if set(self.results) != wanted:
            raise PlanError(
                f"{len(self.results)} results for {len(self.students)} students x {len(self.questions)} questions: "
                "each has exactly one."
            )

    def of(self, student: str) -> Iterator[Result]:
        """A student's results, in question order."""
        return (self.results[student, question] for question in self.questions)

    def said(self) -> Iterator[tuple[str, str, str]]:
        """All that the grader noticed, as (student, question, remark); "" for all students, or all questions."""
        yield from (("", "", one) for one in self.notes)
        for student in self.students:
            yield from ((student, "", one) for one in self.remarks.get(student, ()))
            yield from ((student, result.question, one) for result in self.of(student) for one in result.notes)

    def score(self, student: str) -> int:
        """A student's points over all questions."""
        return sum(one.score for one in self.of(student))

    @property
    def max_score(self) -> int:
        """All points of all questions."""
        return sum(one.max_score for one in self.of(self.students[0])) if self.students else 0
