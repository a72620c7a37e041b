"""Two tiny exercises: what is tested is how answers are tried and told, whatever the question."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit.exercise import Case, Criterion, Exercise, Finding, Idea, Measure
from labkit.rank.trials.attempt import as_plain
from labkit.rank.trials.traffic import Traffic

QUESTIONS = {
    "00.1": "tests.ranks.small_exercise:TOTAL",
    "00.2": "tests.ranks.small_exercise:PAIR",
    "00.3": "tests.ranks.small_exercise:WIDE",
}


def total(answers: Mapping[str, Callable[..., Any]], group: dist.ProcessGroup, *, size: int) -> dict[str, Any]:
    """The first answer adds up one tensor of each member."""
    with Traffic() as traffic:
        result = next(iter(answers.values()))(torch.full((size,), float(dist.get_rank(group) + 1)), group)
    return {"result": as_plain(result), "calls": traffic.calls}


def pair(answers: Mapping[str, Callable[..., Any]], group: dist.ProcessGroup) -> list[str]:
    """What each of two answers says."""
    return [str(answers[name]()) for name in ("ping", "pong")]


def _case(size: int, *members: int, hidden: bool = False, trial: str = "total") -> Case:
    name = f"{len(members)} ranks, {size} numbers"
    inputs = {"size": size} if trial == "total" else {}
    return Case(
        name=name,
        criterion="sum",
        trial=f"tests.ranks.small_exercise:{trial}",
        members=members,
        inputs=inputs,
        hidden=hidden,
    )


def _judge_total(case: Case, values: tuple[Any, ...]) -> Finding:
    count = len(case.members)
    wanted = [float(count * (count + 1) // 2)] * case.inputs["size"]
    sent = max(len(value["calls"]) for value in values)
    measures = (Measure(name="operations", value=sent, budget=2 * count), Measure(name="sent", value=5000, unit="B"))
    for rank, value in enumerate(values):
        got = value["result"].get("values", value["result"]["type"])
        if got != wanted:
            message = f"rank {rank} of {count} has {got}, and the sum is {wanted[0]:g}."
            given = f"rank r brings {case.inputs['size']} times r + 1"
            return Finding(
                passed=False,
                message=message,
                given=given,
                got=str(got),
                wanted=str(wanted),
                idea="sum",
                measures=measures,
            )
    return Finding(passed=True, measures=measures)


def _judge_pair(case: Case, values: tuple[Any, ...]) -> Finding:
    right = all(value == ["ping", "pong"] for value in values)
    return Finding(passed=right, message="" if right else f"they say {values[0]}.")


IDEAS = {
    "sum": Idea(first="Everybody needs everything.", further="Start with two ranks."),
    "raised": Idea(first="Read the line that raised.", further="Print before it."),
    "timeout": Idea(first="A receive needs its send.", further="Count both."),
}
_CRITERIA = (Criterion(name="sum", points=10, text="the sum"),)
_NARROW = (_case(1, 0, 1), _case(2, 3, 1), _case(3, 0, 1, 2), _case(4, 0, 1, 2, 3), _case(9, 1, 2, hidden=True))

TOTAL = Exercise(
    question="00.1",
    title="total",
    chapter="00_small",
    answers=("total",),
    criteria=_CRITERIA,
    cases=lambda seed: _NARROW,
    judge=_judge_total,
    ideas=IDEAS,
)
PAIR = Exercise(
    question="00.2",
    title="pair",
    chapter="00_small",
    answers=("ping", "pong"),
    criteria=_CRITERIA,
    cases=lambda seed: (_case(1, 0, 1, trial="pair"),),
    judge=_judge_pair,
    ideas={},
)
WIDE = Exercise(
    question="00.3",
    title="wide",
    chapter="00_small",
    answers=("total",),
    criteria=_CRITERIA,
    cases=lambda seed: (_case(1, 0, 1, 2),),
    judge=_judge_total,
    ideas={},
)
