"""Chapter 03: linear layers split over a group by columns and by rows (Shoeybi et al. 2019, arXiv 1909.08053)."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.exercise import Case, Criterion, Exercise, Finding, Idea, Measure

__all__ = ["COLUMN_AND_ROW"]

Array = npt.NDArray[np.float64]
# What a member should have; and by tensor, what a known mistake gives instead, with the reason why that is wrong.
Wanted = dict[str, Array]
Suspects = dict[str, list[tuple[Array, str]]]

TRIALS = "labkit.rank.trials.linear"
COLUMN, ROW, CHAINED = f"{TRIALS}:column", f"{TRIALS}:row", f"{TRIALS}:chained"
ITEM_BYTES = 4  # fp32
NO_BACKWARD = "what communicates must say how its gradient goes back, as a torch.autograd.Function does"
RULES = {
    "output": "it is x times weight transposed, plus bias, as the unsplit layer gives it",
    "x": "it is the upstream gradient times weight, as the unsplit layer gives it",
    "weight": "it is this member's part of the upstream gradient, transposed, times x",
    "bias": "it is the upstream gradient summed over the batch",
}


def _cases(seed: int) -> tuple[Case, ...]:
    visible = (
        _layer("column forward", COLUMN, (0, 1), (2, 3, 4), seed=1),
        _layer("row forward", ROW, (0, 1), (2, 4, 3), seed=2),
        _layer("column backward", COLUMN, (0, 1), (2, 3, 4), seed=3),
        _layer("row backward", ROW, (0, 1), (2, 4, 3), seed=4),
        _chain("both", (0, 1, 2), (2, 4, 6, 5), seed=5),
        _chain("one all-reduce", (0, 1, 2, 3), (3, 5, 8, 6), seed=6),
    )
    draw = random.Random(seed)

    def sizes(split: int, others: int) -> tuple[int, ...]:
        """Different sizes, so that a transposed matrix cannot fit; the first `split` is for what is cut."""
        rest = draw.sample([size for size in range(2, 10) if size != split], others)
        return (split, *rest)

    hidden = []
    for kind, members in (("column", (2, 0, 3)), ("row", (3, 1)), ("column", (3, 2, 1, 0)), ("row", (1, 3, 2))):
        for direction in ("forward", "backward"):
            cut, batch, whole = sizes(len(members) * draw.choice((2, 3)), 2)
            d_in, d_out = (whole, cut) if kind == "column" else (cut, whole)
            trial = COLUMN if kind == "column" else ROW
            shape = (batch, d_in, d_out)
            hidden.append(_layer(f"{kind} {direction}", trial, members, shape, draw.randrange(10**6), hidden=True))
    for name, members in (("both", (2, 0)), ("both", (3, 1, 0)), ("both", (1, 3, 0, 2)), ("one all-reduce", (0, 3, 1))):
        d_hidden, batch, d_in, d_out = sizes(len(members) * draw.choice((2, 3)), 3)
        # A residual path brings x a second gradient, which is whole on every member already.
        residual = len(members) != 2
        widths = (batch, d_in, d_hidden, d_in if residual else d_out)
        hidden.append(_chain(name, members, widths, draw.randrange(10**6), hidden=True, residual=residual))
    return (*visible, *hidden)


def _layer(
    criterion: str, trial: str, members: tuple[int, ...], shape: tuple[int, int, int], seed: int, hidden: bool = False
) -> Case:
    batch, d_in, d_out = shape
    draw = random.Random(seed)
    return Case(
        name=f"{criterion}, {len(members)} ranks, x [{batch}, {d_in}], weight [{d_out}, {d_in}]",
        criterion=criterion,
        trial=trial,
        members=members,
        inputs={
            "x": _matrix(draw, batch, d_in),
            "weight": _matrix(draw, d_out, d_in),
            "bias": _vector(draw, d_out),
            "upstream": _matrix(draw, batch, d_out),
            "backward": criterion.endswith("backward"),
        },
        hidden=hidden,
    )


def _chain(
    criterion: str,
    members: tuple[int, ...],
    shape: tuple[int, int, int, int],
    seed: int,
    hidden: bool = False,
    residual: bool = False,
) -> Case:
    batch, d_in, d_hidden, d_out = shape
    draw = random.Random(seed)
    plus = ", x added at the end" if residual else ""
    return Case(
        name=f"{criterion}, {len(members)} ranks, {d_in} -> {d_hidden} -> {d_out}{plus}",
        criterion=criterion,
        trial=CHAINED,
        members=members,
        inputs={
            "x": _matrix(draw, batch, d_in),
            "up": _matrix(draw, d_hidden, d_in),
            "up_bias": _vector(draw, d_hidden),
            "down": _matrix(draw, d_out, d_hidden),
            "down_bias": _vector(draw, d_out),
            "upstream": _matrix(draw, batch, d_out),
            "residual": residual,
        },
        hidden=hidden,
    )


def _matrix(draw: random.Random, rows: int, columns: int) -> list[list[float]]:
    return [_vector(draw, columns) for _ in range(rows)]


def _vector(draw: random.Random, size: int) -> list[float]:
    """Whole numbers, so that every order of adding gives the same bits; none is 0, so that each one counts."""
    return [float(draw.choice((-4, -3, -2, -1, 1, 2, 3, 4))) for _ in range(size)]


def _judge(case: Case, values: tuple[Any, ...]) -> Finding:
    if case.criterion == "one all-reduce":
        return _judge_traffic(case, values)
    work = {COLUMN: _column, ROW: _row, CHAINED: _chained}[case.trial]
    answer = {COLUMN: "column_parallel", ROW: "row_parallel", CHAINED: "the two layers"}[case.trial]
    is_derived = case.trial == CHAINED or case.inputs["backward"]
    for member, value in enumerate(values):
        on = _on(case, member)
        wanted, suspects = work(case.inputs, member, len(values))
        finding = _compare(f"the output of {answer}", value["output"], "output", wanted, suspects, on)
        if finding is None and is_derived and value["tracked"] is not True:
            finding = _untracked(answer, on)
        if finding is None and is_derived:
            gradients = value["gradients"]
            found = (
                _compare(f"the gradient of {name}", gradients[name], name, wanted, suspects, on)
                for name in wanted
                if name != "output"
            )
            finding = next(filter(None, found), None)
        if finding is not None:
            return finding
    return Finding(passed=True)


def _on(case: Case, member: int) -> str:
    return f"on rank {case.members[member]} (member {member} of {len(case.members)})"


def _untracked(answer: str, on: str) -> Finding:
    return Finding(
        passed=False,
        message=f"the output of {answer} has no gradient function {on}, so 0 gradients came back: {NO_BACKWARD}.",
        idea="autograd",
    )


def _compare(
    what: str, plain: Mapping[str, Any], name: str, wanted: Wanted, suspects: Suspects, on: str
) -> Finding | None:
    """None where a tensor is as wanted, else the finding: what is wrong, and why if the mistake is a known one."""
    right = wanted[name]
    idea = "output" if name == "output" else "gradients"
    if plain["type"] != "Tensor":
        return _no_tensor(what, plain["type"], name, list(right.shape), on)
    if plain["shape"] != list(right.shape):
        why = next((text for array, text in suspects[name] if list(array.shape) == plain["shape"]), _rule(name))
        message = f"{what} has shape {plain['shape']} {on} where {list(right.shape)} is wanted: {why}."
        return Finding(passed=False, message=message, idea=idea)
    got = np.array(plain["values"], dtype=np.float64).reshape(right.shape)
    if np.array_equal(got, right):
        return None
    why = next((text for array, text in suspects[name] if np.array_equal(array, got)), _rule(name))
    place = tuple(int(axis) for axis in np.argwhere(got != right)[0])
    return Finding(
        passed=False,
        message=f"{what} at {list(place)} is {got[place]:.9g} {on} where {right[place]:.9g} is wanted: {why}.",
        got=_row_text(got, place),
        wanted=_row_text(right, place),
        idea=idea,
    )


def _no_tensor(what: str, found: str, name: str, shape: list[int], on: str) -> Finding:
    if name == "output":
        message = f"{what} is of type {found} {on} where a tensor of shape {shape} is wanted: {RULES['output']}."
        return Finding(passed=False, message=message, idea="output")
    why = f"the output depends on it on every member, and {NO_BACKWARD}"
    message = f"{what} is None {on} where a tensor of shape {shape} is wanted: {why}."
    return Finding(passed=False, message=message, idea="autograd")


def _rule(name: str) -> str:
    return RULES[{"up": "weight", "down": "weight", "up_bias": "bias", "down_bias": "bias"}.get(name, name)]


def _row_text(array: Array, place: tuple[int, ...]) -> str:
    row = array[place[:-1]]
    text = ", ".join(f"{number:.9g}" for number in row[:8])
    return f"[{text}{', ...' if len(row) > 8 else ''}]" + (f" (row {place[0]})" if len(place) > 1 else "")


def _cut(array: Array, member: int, num_members: int, axis: int) -> Array:
    return np.split(array, num_members, axis)[member]


def _arrays(inputs: Mapping[str, Any]) -> dict[str, Array]:
    return {name: np.array(value, dtype=np.float64) for name, value in inputs.items() if isinstance(value, list)}


def _column(inputs: Mapping[str, Any], member: int, n: int) -> tuple[Wanted, Suspects]:
    a = _arrays(inputs)
    x, upstream = a["x"], _cut(a["upstream"], member, n, 1)
    weight, bias = _cut(a["weight"], member, n, 0), _cut(a["bias"], member, n, 0)
    wanted = {
        "output": x @ weight.T + bias,
        "x": a["upstream"] @ a["weight"],
        "weight": upstream.T @ x,
        "bias": upstream.sum(0),
    }
    suspects: Suspects = {
        "output": [
            (x @ weight.T, "bias is missing"),
            (x @ a["weight"].T + a["bias"], "a member returns its own columns alone, and nothing is gathered"),
        ],
        "x": [(upstream @ weight, _one_part(n))],
        "weight": [(n * wanted["weight"], _too_large(n)), (wanted["weight"].T, "it is transposed")],
        "bias": [(n * wanted["bias"], _too_large(n))],
    }
    return wanted, suspects


def _row(inputs: Mapping[str, Any], member: int, n: int) -> tuple[Wanted, Suspects]:
    a = _arrays(inputs)
    x, weight, upstream, bias = a["x"], a["weight"], a["upstream"], a["bias"]
    x_part, weight_part = _cut(x, member, n, 1), _cut(weight, member, n, 1)
    wanted = {
        "output": x @ weight.T + bias,
        "x": upstream @ weight_part,
        "weight": upstream.T @ x_part,
        "bias": upstream.sum(0),
    }
    suspects: Suspects = {name: [(n * wanted[name], _too_large(n))] for name in ("x", "weight", "bias")}
    suspects["bias"].append(
        (wanted["bias"] / n, f"it is 1/{n} of that, so each of the {n} members added 1/{n} of bias")
    )
    suspects["bias"].append((np.zeros_like(bias), "bias is the same on every member, and so is its gradient"))
    suspects["output"] = [
        (x_part @ weight_part.T + bias, f"it is one member's part of the sum, and the parts of all {n} must be added"),
        (x @ weight.T + n * bias, f"bias was added {n} times, by each member before the sum: add it once, after it"),
        (x @ weight.T, "bias is missing"),
    ]
    return wanted, suspects


def _chained(inputs: Mapping[str, Any], member: int, n: int) -> tuple[Wanted, Suspects]:
    a = _arrays(inputs)
    x, upstream, down_bias = a["x"], a["upstream"], a["down_bias"]
    residual = inputs["residual"]
    past = upstream if residual else np.zeros_like(x)
    before = x @ a["up"].T + a["up_bias"]
    hidden = np.maximum(before, 0.0)
    d_before = upstream @ a["down"] * (before > 0.0)
    d_part = _cut(d_before, member, n, 1)
    wanted = {
        "output": hidden @ a["down"].T + down_bias + (x if residual else 0.0),
        "x": d_before @ a["up"] + past,
        "up": d_part.T @ x,
        "up_bias": d_part.sum(0),
        "down": upstream.T @ _cut(hidden, member, n, 1),
        "down_bias": upstream.sum(0),
    }
    suspects: Suspects = {name: [(n * array, _too_large(n))] for name, array in wanted.items()}
    suspects["output"].append(
        (wanted["output"] + (n - 1) * down_bias, f"the bias of row_parallel was added {n} times: add it once")
    )
    twice = f"the gradient that came past both layers was summed over the {n} members too, and it was whole already"
    suspects["x"].append((wanted["x"] + (n - 1) * past, twice))
    suspects["x"].append((d_part @ _cut(a["up"], member, n, 0) + past, _one_part(n)))
    return wanted, suspects


def _one_part(n: int) -> str:
    return f"it is one member's part, and x went to all {n} members, so their {n} parts must be added"


def _too_large(n: int) -> str:
    return f"it is {n} times as large, so {n} equal gradients were added where each member has the whole one already"


def _judge_traffic(case: Case, values: tuple[Any, ...]) -> Finding:
    batch = len(case.inputs["x"])
    most = {
        "forward": batch * len(case.inputs["down_bias"]) * ITEM_BYTES,
        "backward": batch * len(case.inputs["x"][0]) * ITEM_BYTES,
    }
    measures = tuple(
        measure
        for way, budget in most.items()
        for measure in (
            Measure(name=f"communications {way}", value=max(len(value[way]) for value in values), budget=1),
            Measure(
                name=f"bytes {way}",
                value=max(sum(c[1] for c in value[way]) for value in values),
                budget=budget,
                unit="B",
            ),
        )
    )
    message = next(filter(None, (_traffic_fault(case, m, value, most) for m, value in enumerate(values))), "")
    return Finding(passed=not message, message=message, idea="traffic" if message else "", measures=measures)


def _traffic_fault(case: Case, member: int, value: Mapping[str, Any], most: Mapping[str, int]) -> str:
    on = _on(case, member)
    if value["tracked"] is not True:
        return f"the two layers gave no output of the right shape to go backward from {on}: 0 of 1 backward passes ran."
    for way, budget in most.items():
        calls = Counter(str(call[0]) for call in value[way])
        if calls != {"all_reduce": 1}:
            made = " and ".join(f"{count} {name}" for name, count in sorted(calls.items())) or "0 all_reduce"
            return f"the two layers made {made} {way} {on} where exactly 1 all_reduce is wanted: {_reason(way, calls)}."
        num_bytes = value[way][0][1]
        if num_bytes > budget:
            what = "output" if way == "forward" else "gradient of x"
            return (
                f"the all_reduce {way} has {num_bytes} B {on} where {budget} B are enough: only the {what} is summed."
            )
    return ""


def _reason(way: str, calls: Counter[str]) -> str:
    if set(calls) - {"all_reduce"}:
        return "a member's columns of the first layer are its inputs of the second, so one sum at the end is enough"
    if way == "forward":
        return "only what row_parallel computed is a part that must be added"
    if calls["all_reduce"] > 1:
        return "the gradient that reaches row_parallel is whole on every member, and only that of x is in parts"
    return "each member has one part of the gradient of x, and they must be added"


COLUMN_AND_ROW = Exercise(
    question="03.1",
    title="a linear layer split by columns, and one split by rows",
    chapter="03_tensor_parallel",
    answers=("column_parallel", "row_parallel"),
    criteria=(
        Criterion(name="column forward", points=1, text="column_parallel returns this member's columns"),
        Criterion(name="row forward", points=1, text="row_parallel returns the whole sum"),
        Criterion(name="column backward", points=2, text="the gradients of column_parallel are the unsplit layer's"),
        Criterion(name="row backward", points=2, text="the gradients of row_parallel are the unsplit layer's"),
        Criterion(name="both", points=2, text="both layers in a row give the unsplit layers' output and gradients"),
        Criterion(name="one all-reduce", points=2, text="both layers need one all_reduce forward and one backward"),
    ),
    cases=_cases,
    judge=_judge,
    ideas={
        "output": Idea(
            first="Which member holds which numbers: write down the shape of each part, then of their product.",
            further="Rows of weight give columns of the output; columns of weight give terms of a sum.",
        ),
        "gradients": Idea(
            first="Ask of each tensor: is its gradient on this member whole, or one term of a sum over the members?",
            further="What goes to all members forward is summed over them backward; what is summed forward goes back "
            "as it is.",
        ),
        "autograd": Idea(
            first="torch.distributed's collectives change tensors behind autograd's back.",
            further="Write a torch.autograd.Function with the collective in forward or in backward, and use its apply.",
        ),
        "traffic": Idea(
            first="What does a member need from the others between the two layers?",
            further="The conjugate operators f and g of Shoeybi et al. 2019, section 3, communicate once each.",
        ),
        "raised": Idea(
            first="The members' parts are smaller than the whole tensors: check the shapes that you multiply.",
            further="Weights are stored as [d_out, d_in]; print the shapes of x and weight in the cell that tries it.",
        ),
        "timeout": Idea(
            first="A collective waits for every member of its group.",
            further="Each collective needs group=group: without it, it waits for ranks that are not members.",
        ),
        "lost": Idea(
            first="A rank's process ended while it ran your code.",
            further="Take out what ends a process, such as sys.exit, and look at the memory that your tensors need.",
        ),
    },
)
