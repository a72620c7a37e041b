"""Chapter 06: a ring all-reduce."""

from typing import Any

import numpy as np

from labkit.exercise import Case, Criterion, Exercise, Finding, Idea, Measure

__all__ = ["RING"]

TRIAL = "labkit.rank.trials.all_reduce:all_reduce"


def _cases(seed: int) -> tuple[Case, ...]:
    return (
        Case(name="2 ranks, 4 numbers", criterion="sum", trial=TRIAL, members=(0, 1), inputs={"size": 4, "seed": 0}),
        Case(
            name="4 ranks, 8 numbers", criterion="sum", trial=TRIAL, members=(0, 1, 2, 3), inputs={"size": 8, "seed": 1}
        ),
        Case(name="3 ranks, 5 numbers", criterion="any", trial=TRIAL, members=(0, 1, 2), inputs={"size": 5, "seed": 2}),
        Case(
            name="hidden", criterion="any", trial=TRIAL, members=(3, 1), inputs={"size": 7, "seed": seed}, hidden=True
        ),
    )


def _judge(case: Case, values: tuple[Any, ...]) -> Finding:
    size, seed = case.inputs["size"], case.inputs["seed"]
    index = np.arange(size)
    wanted = sum(((index * 7 + rank * 13 + seed) % 19 - 9) for rank in range(len(case.members))).astype(float).tolist()
    for rank, value in enumerate(values):
        got = value["result"].get("values")
        if got != wanted:
            return Finding(
                passed=False,
                message=f"rank {rank} of {len(values)} has another sum.",
                got=str(got),
                wanted=str(wanted),
                idea="sum",
            )
    sent = max(sum(one[0] == "send" for one in value["calls"]) for value in values)
    most = 2 * (len(values) - 1)
    return Finding(
        passed=sent <= most,
        message="" if sent <= most else "too many",
        measures=(Measure(name="messages", value=sent, budget=most),),
    )


RING = Exercise(
    question="06.1",
    title="ring all-reduce",
    chapter="06_ring_and_tree",
    answers=("ring_all_reduce",),
    criteria=(Criterion(name="sum", points=4, text="sum"), Criterion(name="any", points=6, text="any")),
    cases=_cases,
    judge=_judge,
    ideas={"sum": Idea(first="a", further="b")},
)
