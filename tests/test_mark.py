"""From what was seen to points: every outcome, partial credit, and values that no trial gives."""

import pytest

from labkit.errors import PlanError
from labkit.exercise import Case, Criterion, Exercise, Finding, Idea, Observation, Wait, mark


def judge(case: Case, values: tuple) -> Finding:
    right = all(value["sum"] == case.inputs["size"] for value in values)
    return Finding(passed=right, message="" if right else f"{values[0]['sum']} for {case.inputs['size']}.", idea="sum")


def case(size: int, criterion: str) -> Case:
    return Case(name=f"{size}", criterion=criterion, trial="m:f", members=(0, 1), inputs={"size": size})


CASES = (case(1, "small"), case(2, "small"), case(9, "large"))
EXERCISE = Exercise(
    question="00.1",
    title="sum",
    chapter="00_sum",
    answers=("total",),
    criteria=(
        Criterion(name="small", points=4, text="small sums"),
        Criterion(name="large", points=6, text="large sums"),
    ),
    cases=lambda seed: CASES,
    judge=judge,
    ideas={"sum": Idea(first="a", further="b"), "timeout": Idea(first="c", further="d")},
)


def returned(value: object, *, count: int = 2) -> Observation:
    return Observation(outcome="returned", values=tuple({"sum": value} for _ in range(count)), seconds=0.5)


def test_full_marks():
    result = mark(EXERCISE, CASES, [returned(1), returned(2), returned(9)])
    assert (result.status, result.score, result.max_score, result.passed) == ("full", 10, 10, True)
    assert (result.message, result.idea, result.first_failure) == ("3 cases passed.", None, None)
    assert result.seconds == 1.5


def test_a_criterion_is_earned_when_each_of_its_cases_passes():
    result = mark(EXERCISE, CASES, [returned(1), returned(2), returned(8)])
    assert (result.status, result.score, result.message) == ("partial", 4, "8 for 9.")
    assert result.earned == (("small", "small sums", 4, 4), ("large", "large sums", 0, 6))
    half = mark(EXERCISE, CASES, [returned(1), returned(0), returned(9)])
    assert (half.status, half.score, half.message) == ("partial", 6, "0 for 2.")
    assert half.idea == EXERCISE.ideas["sum"]


def test_only_what_was_tried_counts():
    result = mark(EXERCISE, CASES[:1], [returned(1)])
    assert (result.status, result.score, result.max_score) == ("full", 4, 4)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("raised", "error"),
        ("timeout", "timeout"),
        ("lost", "crashed"),
        ("unsolved", "unsolved"),
        ("missing", "missing"),
        ("skipped", "wrong"),
    ],
)
def test_how_an_answer_ended_is_its_status(outcome, status):
    result = mark(EXERCISE, CASES[:1], [Observation(outcome=outcome, message="so it ended.")])
    assert (result.status, result.score, result.message) == (status, 0, "so it ended.")
    assert result.idea == EXERCISE.ideas.get(outcome)


def test_a_timeout_without_words_names_the_ranks():
    seen = Observation(outcome="timeout", waits=(Wait(rank=1, doing="waits"), Wait(rank=3, doing="waits")))
    assert "1" in mark(EXERCISE, CASES[:1], [seen]).message


DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize("value", [None, [], {}, "x", float("nan"), DEEP, {"sum": []}, 10**400])
def test_values_that_no_trial_gives_fail_the_case_and_nothing_else(value):
    result = mark(EXERCISE, CASES, [Observation(outcome="returned", values=(value, value)), returned(2), returned(9)])
    assert (result.status, result.score) == ("partial", 6)
    assert len(result.message) < 3000


def test_each_member_must_have_given_a_result():
    result = mark(EXERCISE, CASES[:1], [returned(1, count=1)])
    assert (result.status, result.message) == ("wrong", "1 of 2 ranks gave a result: all of them must.")


def test_what_a_judge_says_is_cut():
    result = mark(EXERCISE, CASES[:1], [returned("x" * 1_000_000)])
    assert len(result.message) < 5000


def test_one_observation_for_each_case():
    with pytest.raises(PlanError, match="1 observations of 3 cases"):
        mark(EXERCISE, CASES, [returned(1)])
    with pytest.raises(PlanError):
        mark(EXERCISE, (), ())
