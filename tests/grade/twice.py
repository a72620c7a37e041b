"""An exercise that is as small as can be, and how answers to it are graded in tests."""

from labkit.exercise import Case, Criterion, Exercise, Finding, Idea, Result
from labkit.grade.limits import Limits
from labkit.grade.question import grade
from labkit.grade.sandbox import Sandbox
from labkit.trial import Answer

TRIAL = "labkit.rank.trials.all_reduce:costs"
RIGHT = "def twice(x):\n    return 2 * x\n"


def _cases(seed: int) -> tuple[Case, ...]:
    def case(name: str, criterion: str, members: tuple[int, ...], number: int, hidden: bool = False) -> Case:
        inputs = {"answer": "twice", "questions": [[number]]}
        return Case(name=name, criterion=criterion, trial=TRIAL, members=members, inputs=inputs, hidden=hidden)

    return (
        case("one", "visible", (0, 1), 1),
        case("two", "visible", (0, 1, 2, 3), 2),
        case("drawn", "hidden", (3, 1), seed, hidden=True),
    )


def _judge(case: Case, values: tuple) -> Finding:
    wanted = [2.0 * case.inputs["questions"][0][0]]
    got = [value for value in values if value != wanted]
    return Finding(passed=not got, message=f"{got[0]} is not twice the number, {wanted}." if got else "", idea="twice")


TWICE = Exercise(
    question="00.1",
    title="twice",
    chapter="00_start",
    answers=("twice",),
    criteria=(Criterion(name="visible", points=4, text="small"), Criterion(name="hidden", points=6, text="any")),
    cases=_cases,
    judge=_judge,
    ideas={key: Idea(first="first", further="further") for key in ("twice", "raised", "timeout", "lost")},
)


def answer(source: str) -> Answer:
    return Answer(names=("twice",), cells=(("s01.ipynb, cell 3", source),))


def graded(where: Sandbox, source: str, **limits: float) -> Result:
    return grade(TWICE, answer(source), seed=7, sandbox=where, limits=Limits(**limits))
