"""Chapter 11: a cast to FP8 under delayed scaling, held to Transformer Engine's formulas, computed here without torch.

The formats are those of Micikevicius et al. 2022 (arXiv 2209.05433), the rest is Transformer Engine's recipe
DelayedScaling (release 2.20: `common/recipe`, and `_default_sf_compute` in `pytorch/quantization.py` for an amax of 0,
infinity or NaN).
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from labkit.checks.precision_ideas import IDEAS
from labkit.exercise import Case, Criterion, Exercise, Finding, Measure
from labkit.formats import Format

__all__ = ["DELAYED_SCALING"]

TRIAL = "labkit.rank.trials.delayed_scaling:delayed_cast"
LARGEST = float(np.finfo(np.float32).max)
# Two ways to compute a quotient in float32 differ by so much at most; every mistake is a thousand times as far away.
TOLERANCE = 1e-6
DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
# What a rank may send in a step, for each rank of the group: one amax in double precision.
BYTES_PER_RANK = 8
_SILENT = ("recv", "barrier")

Steps = list[list[list[float]]]


def _case(
    criterion: str,
    members: tuple[int, ...],
    amaxes: Sequence[float],
    draw: random.Random,
    *,
    dtype: str = "e4m3",
    shape: tuple[int, ...] = (6,),
    history: int = 4,
    algorithm: str = "most_recent",
    margin: int = 0,
    hidden: bool = False,
) -> Case:
    """A case of one step for each amax; in the cases of "group" one member has it, in turn, elsewhere all have."""
    order = "" if list(members) == list(range(len(members))) else f" {list(members)}"
    rule = f"{algorithm} of {history}" if algorithm == "max" else algorithm
    steps = [_tensors(amax, len(members), shape, step, draw, criterion == "group") for step, amax in enumerate(amaxes)]
    return Case(
        name=f"{len(members)} ranks{order}, {dtype}, {rule}, margin {margin}, {len(amaxes)} steps",
        criterion=criterion,
        trial=TRIAL,
        members=members,
        inputs={
            "steps": steps,
            "shape": list(shape),
            "recipe": {
                "dtype": dtype,
                "fp8_max": Format.find(dtype).largest,
                "history": history,
                "algorithm": algorithm,
                "margin": margin,
            },
        },
        hidden=hidden,
    )


def _tensors(
    amax: float, num_members: int, shape: tuple[int, ...], step: int, draw: random.Random, differ: bool
) -> list[list[float]]:
    """Each member's numbers of a step, all of them float32: one has the size `amax`, the others are smaller."""
    tensors = []
    for member in range(num_members):
        share = 0.5 ** ((member + step + 1) % num_members) if differ else 1.0
        bound = share * amax if math.isfinite(amax) else 1.0
        numbers = [draw.uniform(-0.9, 0.9) * bound for _ in range(math.prod(shape))]
        numbers[draw.randrange(len(numbers))] = draw.choice([-1.0, 1.0]) * share * amax
        tensors.append([float(np.float32(one)) for one in numbers])
    return tensors


def _cases(seed: int) -> tuple[Case, ...]:
    known, draw = random.Random(11), random.Random(seed)
    outlier = draw.choice([40.0, 300.0, 5000.0])
    window = draw.randint(3, 5)
    spiked = [1.0] * (2 * window + 2)
    spiked[1], spiked[window + 2] = outlier, outlier / 4
    inf, nan = math.inf, math.nan
    return (
        _case("scale", (0, 1), (4.0, 8.0, 16.0), known),
        _case("scale", (0, 1), (3.0, 5.0, 70.0), known, margin=2),
        _case("cast", (0, 1), (2.0, 2.0, 30.0, 1.0), known),
        _case("cast", (0, 1), (0.5, 100.0, 1.0), known, dtype="e5m2"),
        _case("history", (0, 1), (1.0, 50.0, 1.0, 2.0, 1.0, 1.0, 1.0), known, history=3, algorithm="max"),
        _case("group", (0, 1, 2, 3), (3.0, 6.0, 12.0), known, shape=(16,)),
        _case("edges", (0, 1), (0.0, 5.0, 0.0, 5.0), known),
        _case("edges", (0, 1), (4.0, inf, 8.0, nan, 8.0), known),
        _case(
            "scale", (3, 1, 2), [draw.uniform(1, 9) * 3**i for i in range(4)], draw, shape=(2, 5), margin=1, hidden=True
        ),
        _case("cast", (1, 0), (1.0, outlier, 1.0, 20.0), draw, shape=(3, 3), hidden=True),
        _case("cast", (0, 2, 1), (7.0, 7.0 * outlier, 0.001), draw, dtype="e5m2", hidden=True),
        _case("history", (2, 0), spiked, draw, history=window, algorithm="max", dtype="e5m2", hidden=True),
        _case("history", (0, 1), (9.0, 2.0, 1.0), draw, history=1, algorithm="max", hidden=True),
        _case("history", (0, 1), (2.0, inf, 1.0, 1.0, 1.0), draw, history=2, algorithm="max", hidden=True),
        _case("group", (3, 0), [draw.uniform(1, 9) for _ in range(3)], draw, dtype="e5m2", shape=(16,), hidden=True),
        _case("group", (2, 0, 3, 1), [draw.uniform(1, 9) for _ in range(5)], draw, shape=(4, 8), hidden=True),
        _case("group", (0, 1, 2), (1.0, 0.0, 3.0), draw, shape=(16,), hidden=True),
        _case("edges", (0, 1, 2), (1e-40, 1e-40, 2.0), draw, hidden=True),
        _case("edges", (1, 0), (nan, inf, draw.uniform(1, 9), 0.0, 1.0), draw, dtype="e5m2", hidden=True),
    )


def _amax(numbers: Sequence[float]) -> float:
    """The largest size among numbers; NaN when one of them is."""
    return float(np.max(np.abs(np.asarray(numbers))))


def _next_scale(amax: float, scale: float, recipe: Mapping[str, Any]) -> float:
    """The scale that follows from an amax, in float32."""
    if not (0 < amax < math.inf):
        return scale
    with np.errstate(over="ignore"):
        quotient = np.float32(recipe["fp8_max"]) / np.float32(amax) / np.float32(2 ** recipe["margin"])
    return min(float(quotient), LARGEST)


def _scales(
    case: Case,
    member: int,
    *,
    over: str = "group",
    late: bool = True,
    again: bool = False,
    **changed: Any,
) -> list[float]:
    """The scale of each step on a member.

    Args:
        case: its inputs.
        member: the place in the group.
        over: "group" when an amax is the largest of all members; "rank", "mean", "sum" or "signed" for mistakes in it.
        late: whether a step's amax serves from the next step on.
        again: whether the amax is taken after scaling.
        changed: fields of the recipe that are not as the case says.
    """
    recipe = {**case.inputs["recipe"], **changed}
    scale, seen, used = 1.0, [], []
    for tensors in case.inputs["steps"]:
        before = scale
        seen.append(_reduced(tensors, member, over) * (scale if again else 1.0))
        window = seen[-recipe["history"] :] if recipe["algorithm"] == "max" else seen[-1:]
        scale = _next_scale(_amax(window), scale, recipe)
        used.append(before if late else scale)
    return used


def _reduced(tensors: Sequence[Sequence[float]], member: int, over: str) -> float:
    """The amax of a step as a member knows it."""
    each = [_amax(tensor) for tensor in tensors]
    if over == "signed":
        return float(np.max(tensors))
    return {"group": _amax(each), "rank": each[member], "mean": sum(each) / len(each), "sum": sum(each)}[over]


def _judge(case: Case, values: tuple[Any, ...]) -> Finding:
    for step in range(len(case.inputs["steps"])):
        for member, value in enumerate(values):
            if wrong := _form(case, value["steps"][step]):
                return _finding(case, f"{wrong} {_place(case, member, step)}", idea="form")
    for member, value in enumerate(values):
        wanted, got = _scales(case, member), [one["scale"] for one in value["steps"]]
        for step in range(len(wanted)):
            if not _near(got[step], wanted[step]):
                return _wrong_scale(case, member, step, got, wanted)
    for member, value in enumerate(values):
        for step, told in enumerate(value["steps"]):
            if wrong_cast := _wrong_cast(case, member, step, told):
                return wrong_cast
    saturated = sum(_saturated(case, one["cast"]["values"]) for value in values for one in value["steps"])
    return _traffic(
        case, values, [Measure(name="numbers at the end of the format, all steps and ranks", value=saturated)]
    )


def _form(case: Case, told: Mapping[str, Any]) -> str:
    """What is wrong with the form of a result, or ""."""
    if "type" in told:
        return f"the function returned a {told['type']} and not the pair (x_fp8, scale)"
    shape, dtype = case.inputs["shape"], DTYPES[case.inputs["recipe"]["dtype"]]
    cast = told["cast"]
    if "shape" not in cast:
        return f"x_fp8 is a {cast['type']} and not a tensor"
    if cast["dtype"] != dtype:
        return f"x_fp8 has dtype {cast['dtype']} and not {dtype}"
    if cast["shape"] != shape:
        return f"x_fp8 has shape {cast['shape']} and not {shape}"
    if not isinstance(told["scale"], float):
        return f"scale is a {told['scale'].get('type')} and not one number"
    return ""


def _near(got: float, wanted: float) -> bool:
    return abs(got - wanted) <= TOLERANCE * abs(wanted)


def _wrong_scale(case: Case, member: int, step: int, got: Sequence[float], wanted: Sequence[float]) -> Finding:
    """Name a wrong scale, and the known mistake that gives just these scales."""
    why, idea = _mistake(case, member, step, got)
    return _finding(
        case,
        f"the scale is {got[step]:.6g} and not {wanted[step]:.6g} {_place(case, member, step)}: {why}",
        got=_shown(got),
        wanted=_shown(wanted),
        idea=idea,
    )


def _mistake(case: Case, member: int, step: int, got: Sequence[float]) -> tuple[str, str]:
    """What is wrong with a member's scales, and the idea to revisit."""
    recipe = case.inputs["recipe"]
    amax = _amax([number for tensor in case.inputs["steps"][step - 1] for number in tensor]) if step else 1.0
    if step and not 0 < amax < math.inf and recipe["algorithm"] != "max":
        return f"the amax before it is {amax:g}, and then the scale stays as it was", "edges"
    for changes, why, idea in _mistakes(recipe):
        if all(_same(one, two) for one, two in zip(got, _scales(case, member, **changes), strict=True)):
            return why, idea
    inverse = [1 / one for one in _scales(case, member)]
    if all(_same(one, two) for one, two in zip(got, inverse, strict=True)):
        return "this is 1 / scale, by which one multiplies to get x back", "inverse"
    if step and all(one == 1.0 for one in got):
        return "it never changes: what is kept for later steps belongs into `state`", "state"
    if not math.isfinite(got[step]) or got[step] == 0:
        return "a scale is a finite number above 0", "edges"
    return f"fp8_max {recipe['fp8_max']:g} over the amax that the steps before it give", "scale"


def _mistakes(recipe: Mapping[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
    """Known ways to get scales wrong: what is changed, what to say, and the idea."""
    length, margin = recipe["history"], recipe["margin"]
    other = "most_recent" if recipe["algorithm"] == "max" else "max"
    return [
        ({"late": False}, "this step's own amax is in it, and delayed scaling knows only the steps before", "current"),
        ({"over": "rank"}, "this is from the amax of this rank alone, and the group has one for all", "group"),
        ({"late": False, "over": "rank"}, "this is from this step's own amax on this rank alone", "current"),
        (
            {"over": "mean"},
            "this is from the mean of the ranks' amaxes, and the group's is the largest of them",
            "group",
        ),
        ({"over": "sum"}, "this is from the sum of the ranks' amaxes, and the group's is the largest of them", "group"),
        ({"over": "signed"}, "this is from the largest number, and the amax is the largest absolute value", "signed"),
        ({"margin": 0}, f"the margin of {margin} is left out", "margin"),
        ({"margin": -margin}, f"the margin of {margin} makes the scale larger, and it must make it smaller", "margin"),
        ({"again": True}, "the amax is taken of x times the scale, and it is that of x itself", "scaled"),
        ({"history": max(1, length - 1)}, f"the window holds {length - 1} steps, and it has {length}", "window"),
        ({"history": length + 1}, f"the window holds {length + 1} steps, and it has {length}", "window"),
        ({"history": 10**6}, f"the window forgets nothing, and it has {length} steps", "window"),
        (
            {"algorithm": other},
            f"this is from the rule {other!r}, and the recipe says {recipe['algorithm']!r}",
            "window",
        ),
    ]


def _same(one: float, two: float) -> bool:
    return _near(one, two) or one == two or (math.isnan(one) and math.isnan(two))


def _round(case: Case, numbers: Sequence[float], by: Callable[[float], float]) -> list[float]:
    """Numbers as the format holds them, saturated, after a float32 product or quotient."""
    form = Format.find(case.inputs["recipe"]["dtype"])
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return [form.nearest(float(np.float32(by(one))), saturate=True).value for one in numbers]


def _wrong_cast(case: Case, member: int, step: int, told: Mapping[str, Any]) -> Finding | None:
    """Name the first number that is not x times the returned scale, saturated and rounded."""
    x, scale, got = case.inputs["steps"][step][member], told["scale"], told["cast"]["values"]

    def times(one: float) -> float:
        return float(one * scale)

    low, high = (_round(case, [one * by for one in x], times) for by in (1 - TOLERANCE, 1 + TOLERANCE))
    right = [_same(one, a) or _same(one, b) for one, a, b in zip(got, low, high, strict=True)]
    if all(right):
        return None
    first = right.index(False)
    exact = _round(case, x, times)
    why, idea = _cast_mistake(case, x, scale, got, first)
    return _finding(
        case,
        f"number {first} of {len(x)} is {got[first]:g} and not {exact[first]:g} {_place(case, member, step)}: "
        f"x is {x[first]:.6g}, the scale {scale:.6g}; {why}",
        got=_shown(got),
        wanted=_shown(exact),
        idea=idea,
    )


def _cast_mistake(case: Case, x: Sequence[float], scale: float, got: Sequence[float], first: int) -> tuple[str, str]:
    form = Format.find(case.inputs["recipe"]["dtype"])
    if not math.isfinite(got[first]) and not math.isnan(x[first]):
        return f"what is beyond {form.largest:g} becomes {form.largest:g}", "saturate"
    ways: tuple[tuple[Callable[[float], float], str], ...] = (
        (lambda one: one, "this is x without the scale"),
        (lambda one: one * scale * scale, "the scale is in it twice"),
        (lambda one: one / scale, "x is divided by the scale and not multiplied"),
    )
    for by, why in ways:
        if all(_same(one, two) for one, two in zip(got, _round(case, x, by), strict=True)):
            return why, "cast"
    return f"x times the scale, cut to {form.largest:g}, is rounded to the nearest number of the format", "cast"


def _saturated(case: Case, numbers: Sequence[float]) -> int:
    return sum(abs(one) == case.inputs["recipe"]["fp8_max"] for one in numbers)


def _traffic(case: Case, values: Sequence[Any], measures: list[Measure]) -> Finding:
    """What the ranks sent; it decides in the cases of "group"."""
    num_members, decides = len(values), case.criterion == "group"
    sent = max(
        sum(num_bytes for name, num_bytes, _ in step["calls"] if name not in _SILENT)
        for value in values
        for step in value["steps"]
    )
    most = BYTES_PER_RANK * num_members
    measure = Measure(name="bytes that a rank sends in a step", value=sent, budget=most if decides else None, unit="B")
    if measure.kept:
        return Finding(passed=True, measures=(*measures, measure))
    return _finding(
        case,
        f"a rank of {num_members} sends {sent} B in a step, and {most} B are enough: the group needs one amax",
        idea="traffic",
        measures=(*measures, measure),
    )


def _finding(case: Case, message: str, **fields: Any) -> Finding:
    """A finding that did not pass."""
    recipe = ", ".join(f"{name} {value}" for name, value in case.inputs["recipe"].items())
    amaxes = [_amax([number for tensor in tensors for number in tensor]) for tensors in case.inputs["steps"]]
    given = f"amaxes {_shown(amaxes)} on {len(case.members)} ranks; {recipe}"
    return Finding(passed=False, message=f"{message}.", given=given, **fields)


def _place(case: Case, member: int, step: int) -> str:
    return f"in step {step + 1} of {len(case.inputs['steps'])} on rank {member} of {len(case.members)}"


def _shown(numbers: Sequence[float]) -> str:
    """The first numbers of a list."""
    text = ", ".join(f"{one:.6g}" for one in numbers[:8])
    return f"[{text}, ... {len(numbers)} in all]" if len(numbers) > 8 else f"[{text}]"


DELAYED_SCALING = Exercise(
    question="11.1",
    title="delayed scaling: from an amax history to a scale",
    chapter="11_precision",
    answers=("delayed_cast",),
    criteria=(
        Criterion(name="scale", points=2, text="a step's scale is fp8_max / amax / 2^margin of the step before"),
        Criterion(
            name="cast", points=2, text="both formats, rounded by the scale, and saturated where a tensor outgrows it"
        ),
        Criterion(name="history", points=2, text="the largest amax of a window, which forgets an outlier in time"),
        Criterion(name="group", points=2, text="one scale for the whole group, for a few bytes"),
        Criterion(name="edges", points=2, text="an amax of 0, infinity or NaN, and one that is tiny"),
    ),
    cases=_cases,
    judge=_judge,
    ideas=IDEAS,
)
