"""The judge of the ZeRO-1 step: its AdamW is PyTorch's, its data hide no mistake, its findings say what is wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from labkit.checks import data_parallel as checks
from labkit.exercise import Case, Finding
from labkit.rank.trials import zero

EXERCISE = checks.ZERO1_STEP
CASES = [case for seed in range(12) for case in EXERCISE.cases(seed)]
STEPS = next(case for case in CASES if case.criterion == "steps")
SHARDED = next(case for case in CASES if case.criterion == "sharded")
TRAFFIC = next(case for case in CASES if case.criterion == "traffic")

Change = Callable[[list[list[float]]], Any]


def judged(case: Case, weights: Any, *, kept: int = 0, calls: Any = ()) -> Finding:
    """The finding about members that all have these weights after each step."""
    step = [
        {"weights": {"type": "Tensor", "shape": [len(after)], "values": list(after)}, "calls": calls, "kept": kept}
        for after in weights
    ]
    return EXERCISE.judge(case, tuple({"steps": step} for _ in case.members))


def by_torch(case: Case) -> list[np.ndarray]:
    """The weights after each step of PyTorch's AdamW on the mean of what the trial gives the members."""
    size, seed, scale = (case.inputs[name] for name in ("size", "seed", "scale"))
    weights = torch.nn.Parameter(zero.weights(size, seed))
    optimizer = torch.optim.AdamW([weights], **case.inputs["adamw"])
    after = []
    for step in range(case.inputs["num_steps"]):
        members = range(len(case.members))
        weights.grad = torch.stack([zero.gradients(rank, size, seed, step, scale) for rank in members]).mean(0)
        optimizer.step()
        after.append(weights.detach().numpy().copy())
    return after


def test_the_judge_agrees_with_pytorch() -> None:
    for case in CASES:
        finding = judged(case, by_torch(case))
        assert finding.passed, (case.inputs, finding)


def test_no_mistake_passes_for_the_right_step() -> None:
    for case in CASES:
        mistakes = [checks._train(case, checks._sum), checks._train(case, checks._own)]
        if case.inputs["num_steps"] > 1:
            mistakes.append(checks._train(case, forget=True))
        for mistake in mistakes:
            assert not judged(case, mistake).passed, case.inputs


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_means_are_exact_in_every_way_of_averaging(num_members: int) -> None:
    members = [zero.gradients(rank, 64, 5, 1, num_members * checks.UNIT) for rank in range(num_members)]
    ways = [
        torch.stack(members).sum(0) / num_members,
        torch.stack(members[::-1]).sum(0) * (1 / num_members),
        torch.stack([one / num_members for one in members]).sum(0),
        torch.stack([one * (1 / num_members) for one in members]).sum(0),
    ]
    assert all(torch.equal(one, ways[0]) for one in ways)


def test_larger_gradients_would_hide_the_sum() -> None:
    inputs = {**STEPS.inputs, "scale": 1.0}
    case = Case(name="", criterion="steps", trial="", members=STEPS.members, inputs=inputs)
    assert judged(case, checks._train(case, checks._sum)).passed


@pytest.mark.parametrize(
    ("change", "message", "idea"),
    [
        (
            lambda right: checks._train(STEPS, checks._sum),
            "weight 0 of 8 is 0.759112 and not 0.75872 after step 1 on rank 0 of 4: this is AdamW on the sum of the 4 "
            "gradients, and the step uses their mean.",
            "mean",
        ),
        (
            lambda right: [checks._weights(STEPS)] * len(right),
            "weight 0 of 8 is 0.75 and not 0.75872 after step 1 on rank 0 of 4: no weight has changed, and the step "
            "updates `weights` in place.",
            "place",
        ),
        (
            lambda right: [[*after[:6], 1.0, float("nan")] for after in right],
            "weight 6 of 8 is 1 and not 1.73839 after step 1 on rank 0 of 4: 2 of 8 weights differ from AdamW on the "
            "mean gradient.",
            "shard",
        ),
        (lambda right: [after[:6] for after in right], "`weights` has shape [6] after step 1 on rank 0 of 4.", "place"),
    ],
    ids=["sum", "unchanged", "another", "shape"],
)
def test_a_finding_says_what_is_wrong(change: Change, message: str, idea: str) -> None:
    finding = judged(STEPS, change(checks._train(STEPS)))
    assert (finding.message, finding.idea) == (message, idea)
    assert idea in EXERCISE.ideas


def test_state_is_held_to_a_shard() -> None:
    right = checks._train(SHARDED)
    assert judged(SHARDED, right, kept=48).passed
    finding = judged(SHARDED, right, kept=49)
    assert finding.message.startswith("rank 3 of 4 keeps 49 numbers between steps, and 48 are enough")


def test_bytes_are_held_to_those_of_an_all_reduce() -> None:
    right = checks._train(TRAFFIC)
    halves = [["reduce_scatter", 48, -1], ["all_gather", 48, -1]]
    assert judged(TRAFFIC, right, calls=halves).passed
    assert judged(TRAFFIC, right, calls=[["all_reduce", 48, -1], ["barrier", 0, -1]]).passed
    assert judged(TRAFFIC, right, calls=[["send", 64, 1], ["recv", 64, 2]]).passed
    finding = judged(TRAFFIC, right, calls=[["all_reduce", 48, -1], ["all_gather", 48, -1]])
    assert finding.message.startswith(
        "a rank of 3 sends 96 B in a step by all_reduce + all_gather, and 64 B are enough"
    )


class Holder:
    """Keeps something where only attributes lead."""

    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


def test_a_hidden_tensor_is_found_wherever_it_is_kept() -> None:
    given, hidden = torch.zeros(5), torch.zeros(7)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(hidden)])

    def step() -> None:
        """Has an attribute, below."""

    step.cache = hidden  # type: ignore[attr-defined]
    for state in ({"a": [(hidden,)]}, {"a": Holder(hidden)}, {"a": optimizer}, {"a": lambda: hidden}, {"a": step}):
        assert zero._num_kept([{**state, "own": given[2:]}], [given]) == 7
    assert zero._num_kept([{"slice": hidden[:1], "step": torch.tensor(1.0), "torch": torch}], [given]) == 7


def test_cases_cover_what_the_exercise_promises() -> None:
    hidden = [case for case in CASES if case.hidden]
    assert {len(case.members) for case in hidden} == {2, 3, 4}
    assert any(case.inputs["size"] < len(case.members) for case in hidden)
    assert any(list(case.members) != sorted(case.members) for case in hidden)
    assert EXERCISE.max_score == 10
    assert {case.criterion for case in CASES if not case.hidden} == {one.name for one in EXERCISE.criteria}
