"""The judge of the repaired DeepSpeed run: what is right passes, every mistake is named, and no two look the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from labkit.checks import deepspeed as checks
from labkit.exercise import Case, Finding

EXERCISE = checks.REPAIR
CASES = [case for seed in range(12) for case in EXERCISE.cases(seed)]
VISIBLE = {case.criterion: case for case in EXERCISE.cases(0) if not case.hidden}


def right(case: Case) -> dict[str, Any]:
    """What a member tells of an answer that does all that is asked for."""
    asked, before, after = case.inputs["asked"], case.inputs["num_before"], case.inputs["num_after"]
    accumulation = asked["batch_size"] // (asked["microbatch_size"] * len(case.members))
    rates = checks._rates(asked, before + after)
    steps = [{"rate": rate, "loss": 1 / (1 + step)} for step, rate in enumerate(rates)]
    told: dict[str, Any] = {
        "batch": asked["batch_size"],
        "micro": asked["microbatch_size"],
        "accumulation": accumulation,
        "stage": asked["stage"],
        "dtype": "bfloat16",
        "offloaded": [],
        "bucket_numbers": asked["bucket_bytes"] // 2,
        "trained": steps[:before],
    }
    if after:
        num_samples = before * asked["batch_size"] + case.inputs["num_skipped"]
        told |= {"num_samples": num_samples, "returned": num_samples, "step": before}
        told |= {"loads": [{"where": ".", "tag": "None", "found": True}]}
        told |= {"unbroken": steps[before:], "resumed": copy.deepcopy(steps[before:])}
    return told


def judged(case: Case, change: Callable[[dict[str, Any]], Any] = lambda told: None) -> Finding:
    """The finding about members of which the last tells something else."""
    told = [copy.deepcopy(right(case)) for _ in case.members]
    change(told[-1])
    return EXERCISE.judge(case, tuple(told))


def test_what_is_right_passes_every_case() -> None:
    for case in CASES:
        assert judged(case).passed, case


def test_cases_are_within_what_deepspeed_can_do_and_differ() -> None:
    for case in CASES:
        asked = case.inputs["asked"]
        assert asked["batch_size"] % (asked["microbatch_size"] * len(case.members)) == 0
        assert case.inputs["num_before"] <= asked["num_steps"]
        if case.criterion == "samples":
            assert case.inputs["num_skipped"] > 0, "without it, steps times batch is the answer"
    hidden = [case for case in EXERCISE.cases(0) if case.hidden]
    assert {len(case.members) for case in hidden} == {2, 3, 4}
    assert EXERCISE.cases(1)[:5] == EXERCISE.cases(2)[:5]
    assert EXERCISE.cases(1)[5:] != EXERCISE.cases(2)[5:]
    assert {case.criterion for case in hidden} == {one.name for one in EXERCISE.criteria}


def test_rates_are_those_of_a_straight_rise_and_fall() -> None:
    asked = {"learning_rate": 1.0, "num_warmup_steps": 2, "num_steps": 6}
    assert checks._rates(asked, 8) == [0, 0, 0.5, 1.0, 0.75, 0.5, 0.25, 0]


MISTAKES = {
    "no scheduler": (
        "rate",
        lambda told: [one.update(rate=0.01) for one in told["trained"]],
        "step 1 was taken with the learning rate 0.01 and not 0: it never changes.",
        "scheduler",
    ),
    "another stage": ("memory", lambda told: told.update(stage=3), "ZeRO stage 3 runs, and 2 was asked for.", "stage"),
    "float32": (
        "memory",
        lambda told: told.update(dtype="float32"),
        "the weights are float32, and bfloat16 was asked for.",
        "precision",
    ),
    "another micro-batch": (
        "batch",
        lambda told: told.update(micro=1, accumulation=4),
        "a micro-batch has 1 samples (1 * 4 * 4), and 2 were asked for.",
        "batch",
    ),
    "nothing loaded": (
        "restore",
        lambda told: told.update(loads=[]),
        "`restore` did not call engine.load_checkpoint on rank 3 of 4.",
        "restore",
    ),
    "other weights": (
        "restore",
        lambda told: told["resumed"][0].update(loss=0.3),
        "step 4 has the loss 0.3 after `restore` and 0.25 without a break.",
        "weights",
    ),
    "other averages": (
        "restore",
        lambda told: told["resumed"][1].update(loss=0.3),
        "step 5 has the loss 0.3 after `restore` and 0.2 without a break.",
        "partial",
    ),
    "no number": (
        "samples",
        lambda told: told.update(returned="NoneType"),
        "`restore` returned NoneType on rank 2, and `save` was given 17, of which 12 were trained on.",
        "samples",
    ),
    "a key that nobody knows": (
        "memory",
        lambda told: told.update(refused="ValidationError: reduce_size Extra inputs are not permitted [type=extra]"),
        "DeepSpeed refuses the configuration on 2 ranks (ValidationError: reduce_size Extra inputs are not permitted).",
        "refused",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_both_numbers(name: str) -> None:
    criterion, change, message, idea = MISTAKES[name]
    finding = judged(VISIBLE[criterion], change)
    assert (finding.passed, finding.message, finding.idea) == (False, message, idea)


def test_every_idea_that_is_named_exists() -> None:
    assert {idea for _, _, _, idea in MISTAKES.values()} <= set(EXERCISE.ideas)
    for outcome in ("raised", "timeout", "lost", "unsolved", "missing"):
        assert outcome in EXERCISE.ideas
