"""The judge of delayed scaling: scales are Transformer Engine's, casts torch's, and findings say what is wrong."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from labkit.checks import precision as checks
from labkit.exercise import Case, Finding
from labkit.rank.trials.delayed_scaling import DTYPES

EXERCISE = checks.DELAYED_SCALING
CASES = [case for seed in range(5) for case in EXERCISE.cases(seed)]
FIRST = {name: next(case for case in CASES if case.criterion == name) for name in ("scale", "cast", "history", "group")}
INF, NAN = math.inf, math.nan

# (fp8_max, margin, history, algorithm), amaxes, and the scales after each of them by Transformer Engine 2.20.2 on
# a CPU: `_default_get_amax_and_update_history` and `_default_sf_compute` of its pytorch/quantization.py, from scale 1.
# Torch divides a number by a tensor in two roundings, so the last digit may differ.
GIVEN = [
    ((448, 0, 3, "max"), [1, 50, 1, 2, 1, 1, 3], [448, 8.96000004, 8.96000004, 8.96000004, 224, 224, 149.333344]),
    (
        (57344, 2, 4, "most_recent"),
        [3, 5, 0, 7, INF, 2, NAN, 0.1],
        [4778.66699, 2867.19995, 2867.19995, 2048, 2048, 7168, 7168, 143360],
    ),
    ((448, 1, 2, "max"), [2, INF, 1, 1, 1, 0, 0, 0, 4], [112, 112, 112, 224, 224, 224, 224, 224, 56]),
    (
        (448, 0, 1, "max"),
        [9, 2, 1e-40, 1e-45, 3e38, 0.3],
        [49.7777786, 224, 3.40282347e38, 3.40282347e38, 1.49333324e-36, 1493.33325],
    ),
    ((57344, 0, 5, "max"), [0, 0, 0.001, NAN, *[2] * 6], [1, 1, *[57343996] * 6, 28672, 28672]),
    ((448, 3, 1024, "max"), [0.7, 0.2, 11, 0.4], [80, 80, 5.090909, 5.090909]),
]


@pytest.mark.parametrize(("recipe", "amaxes", "scales"), GIVEN)
def test_scales_are_those_of_transformer_engine(
    recipe: tuple[Any, ...], amaxes: list[float], scales: list[float]
) -> None:
    names = dict(zip(("fp8_max", "margin", "history", "algorithm"), recipe, strict=True))
    steps = [[[float(torch.tensor(amax))]] for amax in (*amaxes, 1.0)]
    case = Case(name="", criterion="scale", trial="", members=(0,), inputs={"steps": steps, "recipe": names})
    assert checks._scales(case, 0) == pytest.approx([1.0, *scales], rel=2.5e-7)


def answered(case: Case, change: Callable[[int, int, Any], Any] | None = None) -> tuple[Any, ...]:
    """What the trial would tell of a right answer in torch, each (member, step) changed by `change`."""
    values = []
    for member in range(len(case.members)):
        steps = []
        for step, scale in enumerate(checks._scales(case, member)):
            x = torch.tensor(case.inputs["steps"][step][member]).view(*case.inputs["shape"])
            limit = case.inputs["recipe"]["fp8_max"]
            told = {
                "cast": plain(case, (x * scale).clamp(-limit, limit)),
                "scale": scale,
                "calls": [["all_reduce", 4, -1]],
            }
            steps.append(told if change is None else {**told, **change(member, step, told)})
        values.append({"steps": steps})
    return tuple(values)


def plain(case: Case, x: torch.Tensor) -> dict[str, Any]:
    dtype = DTYPES[case.inputs["recipe"]["dtype"]]
    numbers = x.to(dtype).double().flatten().tolist()
    return {"type": "Tensor", "shape": list(x.shape), "dtype": str(dtype).removeprefix("torch."), "values": numbers}


def judged(case: Case, change: Callable[[int, int, Any], Any] | None = None) -> Finding:
    return EXERCISE.judge(case, answered(case, change))


def test_the_judge_agrees_with_casts_by_torch() -> None:
    for case in CASES:
        finding = judged(case)
        assert finding.passed, (case, finding)


@pytest.mark.parametrize(
    "change", [{"late": False}, {"again": True}, *({"over": over} for over in ("rank", "mean", "sum", "signed"))]
)
def test_a_known_mistake_is_seen_in_hidden_cases_too(change: dict[str, Any]) -> None:
    for hidden in (False, True):
        cases = [case for case in CASES[:19] if case.hidden is hidden]
        findings = [
            judged(case, lambda member, step, told, case=case: {"scale": checks._scales(case, member, **change)[step]})
            for case in cases
        ]
        assert any(not one.passed and one.idea in EXERCISE.ideas for one in findings)


@pytest.mark.parametrize("change", [{"history": 2}, {"history": 4}, {"history": 99}, {"algorithm": "most_recent"}])
def test_a_wrong_window_is_seen_and_named(change: dict[str, Any]) -> None:
    case = FIRST["history"]
    finding = judged(case, lambda member, step, told: {"scale": checks._scales(case, member, **change)[step]})
    assert not finding.passed
    assert finding.idea == "window"


MISTAKES = {
    "a number for the pair": ("scale", {"type": "Tensor"}, "the function returned a Tensor and not the pair", "form"),
    "no tensor": ("scale", {"cast": {"type": "float"}}, "x_fp8 is a float and not a tensor in step 1 of 3", "form"),
    "no number": (
        "scale",
        {"scale": {"type": "Tensor", "shape": [2]}},
        "scale is a Tensor and not one number in step 1 of 3 on rank 0 of 2",
        "form",
    ),
    "inverse": ("scale", lambda told: {"scale": 1 / told["scale"]}, "the scale is 0.00892857 and not 112", "inverse"),
    "frozen": ("scale", {"scale": 1.0}, "the scale is 1 and not 112 in step 2 of 3 on rank 0 of 2: it never", "state"),
    "another": (
        "scale",
        {"scale": 7.0},
        "the scale is 7 and not 1 in step 1 of 3 on rank 0 of 2: fp8_max 448",
        "scale",
    ),
    "bytes": (
        "group",
        {"calls": [["all_gather", 256, -1], ["barrier", 1, -1]]},
        "a rank of 4 sends 256 B in a step, and 32 B are enough: the group needs one amax.",
        "traffic",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_finding_says_what_is_wrong(name: str) -> None:
    criterion, change, message, idea = MISTAKES[name]
    finding = judged(FIRST[criterion], lambda m, s, told: change(told) if callable(change) else change)
    assert finding.message.startswith(message)
    assert finding.idea == idea
    assert idea in EXERCISE.ideas


CASTS: dict[str, tuple[Callable[[torch.Tensor, float], torch.Tensor], str]] = {
    "unscaled": (lambda x, scale: x, "this is x without the scale."),
    "twice": (lambda x, scale: (x * scale * scale).clamp(-448, 448), "the scale is in it twice."),
    "divided": (lambda x, scale: x / scale, "x is divided by the scale and not multiplied."),
    "infinite": (lambda x, scale: torch.full_like(x, NAN), "what is beyond 448 becomes 448."),
    "shifted": (lambda x, scale: x * scale * 1.2, "is rounded to the nearest number of the format."),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_wrong_cast_is_named(name: str) -> None:
    case, (by, why) = FIRST["cast"], CASTS[name]

    def change(member: int, step: int, told: Any) -> Any:
        x = torch.tensor(case.inputs["steps"][step][member])
        return {"cast": plain(case, by(x, told["scale"]))}

    finding = judged(case, change)
    assert finding.message.endswith(why), finding.message
    assert finding.idea in EXERCISE.ideas


def test_rounding_in_another_order_passes() -> None:
    for case in CASES[:19]:

        def change(member: int, step: int, told: Any, case: Case = case) -> Any:
            x = torch.tensor(case.inputs["steps"][step][member]).view(*case.inputs["shape"])
            limit = case.inputs["recipe"]["fp8_max"]
            inverse = torch.tensor(1 / told["scale"])
            return {"cast": plain(case, (x / inverse).clamp(-limit, limit)), "scale": told["scale"] * (1 + 3e-7)}

        assert judged(case, change).passed


def test_cases_cover_what_the_exercise_promises() -> None:
    hidden = [case for case in CASES if case.hidden]
    assert {len(case.members) for case in hidden} == {2, 3, 4}
    assert {case.inputs["recipe"]["dtype"] for case in hidden} == {"e4m3", "e5m2"}
    assert any(list(case.members) != sorted(case.members) for case in hidden)
    assert any(len(case.inputs["shape"]) > 1 for case in hidden)
    assert EXERCISE.max_score == 10
    assert {case.criterion for case in CASES if not case.hidden} == {one.name for one in EXERCISE.criteria}
    saturated = [
        abs(number) == case.inputs["recipe"]["fp8_max"]
        for case in CASES
        if case.criterion == "cast"
        for value in answered(case)
        for number in itertools.chain(*(step["cast"]["values"] for step in value["steps"]))
    ]
    assert sum(saturated) > len(saturated) / 20
