"""Chapter 02: a ZeRO-1 step, compared with AdamW on the mean gradient, which is computed here, without torch.

Gradients are whole multiples of N * 2**-24 for N ranks: sum, mean, and each rank's share of the mean are exact in every
order, so two ways of averaging cannot differ. They are as small as AdamW's eps on purpose: of larger gradients AdamW
forgets the scale, and the sum would pass for the mean.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.exercise import Case, Criterion, Exercise, Finding, Idea, Measure

__all__ = ["ZERO1_STEP"]

Numbers = npt.NDArray[np.float32]

TRIAL = "labkit.rank.trials.zero:zero1_step"
UNIT = 2.0**-24
# Two averages of AdamW and, for whoever wants one, a copy of the shard's weights.
KEPT_PER_WEIGHT = 3
# Bytes that a rank of N sends in a ring, in (N-1)/N of the largest side; other operations count whole.
_RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
_SILENT = ("recv", "barrier")

_ADAMW = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def _case(
    criterion: str,
    members: tuple[int, ...],
    size: int,
    num_steps: int,
    seed: int,
    adamw: Mapping[str, Any] | None = None,
    *,
    hidden: bool = False,
) -> Case:
    order = "" if list(members) == list(range(len(members))) else f" {list(members)}"
    steps = f"{num_steps} step{'s' * (num_steps > 1)}"
    return Case(
        name=f"{len(members)} ranks{order}, {size} weight{'s' * (size > 1)}, {steps}",
        criterion=criterion,
        trial=TRIAL,
        members=members,
        inputs={
            "size": size,
            "seed": seed,
            "num_steps": num_steps,
            "scale": len(members) * UNIT,
            "adamw": dict(adamw or _ADAMW),
        },
        hidden=hidden,
    )


def _cases(seed: int) -> tuple[Case, ...]:
    draw = random.Random(seed)
    adamw = {
        "lr": draw.choice([0.003, 0.02]),
        "betas": draw.choice([[0.8, 0.99], [0.95, 0.9]]),
        "eps": draw.choice([1e-7, 1e-6]),
        "weight_decay": draw.choice([0.01, 0.5]),
    }
    more = draw.randrange(5, 50)
    return (
        _case("step", (0, 1), 4, 1, 1),
        _case("steps", (0, 1, 2, 3), 8, 3, 2),
        _case("any", (0, 1, 2), 5, 2, 3),
        _case("sharded", (0, 1, 2, 3), 64, 2, 4),
        _case("traffic", (0, 1, 2), 12, 2, 5),
        _case("step", (3, 1, 2), 9, 1, draw.randrange(29), adamw, hidden=True),
        _case("steps", (3, 0), 2 * more, 4, draw.randrange(29), adamw, hidden=True),
        _case("any", (1, 0), 1, 2, draw.randrange(29), adamw, hidden=True),
        _case("any", (0, 1, 2, 3), 3, 2, draw.randrange(29), adamw, hidden=True),
        _case("any", (2, 0, 3, 1), 4 * more + draw.randrange(1, 4), 3, draw.randrange(29), hidden=True),
        _case("sharded", (3, 1), 2 * more + 100, 2, draw.randrange(29), hidden=True),
        _case("traffic", (0, 3, 1, 2), 4 * more, 2, draw.randrange(29), hidden=True),
    )


def _weights(case: Case) -> Numbers:
    """The weights before the first step."""
    index = np.arange(case.inputs["size"])
    return np.asarray(((index * 11 + case.inputs["seed"]) % 29 + 4) / 8, dtype=np.float32)


def _gradients(case: Case, step: int) -> Numbers:
    """Every member's gradients at a step, `[members, size]`."""
    index, rank = np.arange(case.inputs["size"]), np.arange(len(case.members))[:, None]
    whole = (index * 7 + rank * 5 + step * 3 + case.inputs["seed"]) % 17 - 6
    return np.asarray(whole * case.inputs["scale"], dtype=np.float32)


def _own(gradients: Numbers) -> Numbers:
    """For each weight the gradient of the member that owns its shard, as if nothing had been added up."""
    num_members, size = gradients.shape
    index = np.arange(size)
    return np.asarray(gradients[index // -(-size // num_members), index])


def _mean(gradients: Numbers) -> Numbers:
    return np.asarray(gradients.mean(axis=0))


def _sum(gradients: Numbers) -> Numbers:
    return np.asarray(gradients.sum(axis=0))


def _train(case: Case, gradient: Callable[[Numbers], Numbers] = _mean, *, forget: bool = False) -> Numbers:
    """The weights after each step of AdamW (Loshchilov and Hutter 2019, algorithm 2), not sharded: `[num_steps, size]`.

    Args:
        case: sizes, seed and settings.
        gradient: what the step uses of all members' gradients.
        forget: begin anew at every step, as an optimizer does that is made in each call.
    """
    adamw = case.inputs["adamw"]
    (beta1, beta2), lr = adamw["betas"], adamw["lr"]
    weights = _weights(case)
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    after = []
    for step in range(case.inputs["num_steps"]):
        num_seen = 1 if forget else step + 1
        used, keep = gradient(_gradients(case, step)), not forget
        first = first * np.float32(keep * beta1) + used * np.float32(1 - beta1)
        second = second * np.float32(keep * beta2) + used * used * np.float32(1 - beta2)
        size = np.sqrt(second) / np.float32((1 - beta2**num_seen) ** 0.5) + np.float32(adamw["eps"])
        moved = np.float32(lr / (1 - beta1**num_seen)) * (first / size)
        weights = np.asarray(weights * np.float32(1 - lr * adamw["weight_decay"]) - moved)
        after.append(weights)
    return np.stack(after)


def _judge(case: Case, values: tuple[Any, ...]) -> Finding:
    wanted = _train(case)
    worst = 0.0
    for step, after in enumerate(wanted):
        for rank, value in enumerate(values):
            told = value["steps"][step]["weights"]
            if told.get("shape") != [len(after)]:
                return _finding(case, f"`weights` {_form(told)} {_place(rank, values, step)}", idea="place")
            got = np.array(told["values"])
            if not _near(got, after, step).all():
                return _wrong_weights(case, wanted, step, _place(rank, values, step), got)
            worst = max(worst, float(np.max(np.abs(got - after) / np.spacing(after))))
    measures = [Measure(name="distance from AdamW on the mean, in last digits", value=worst, budget=len(wanted))]
    return _kept(case, values, measures) if case.criterion == "sharded" else _traffic(case, values, measures)


def _wrong_weights(case: Case, wanted: Numbers, step: int, place: str, got: Numbers) -> Finding:
    """Name the first wrong weight, and the known mistake that gives just these weights."""
    after = wanted[step]
    first = int(np.argmin(_near(got, after, step)))
    why, idea = _mistake(case, after, step, got)
    return _finding(
        case,
        f"weight {first} of {len(got)} is {got[first]:.6g} and not {after[first]:.6g} {place}: {why}",
        got=_shown(got),
        wanted=_shown(after),
        idea=idea,
    )


def _mistake(case: Case, after: Numbers, step: int, got: Numbers) -> tuple[str, str]:
    """What is wrong with weights that are not those of `after`, and the idea to revisit."""
    num_members, size = len(case.members), len(got)
    start, near = _weights(case), _near(got, after, step)
    shard, even = -(-size // num_members), size // num_members * num_members
    if np.array_equal(got, start):
        return "no weight has changed, and the step updates `weights` in place", "place"
    if near[:even].all() and np.array_equal(got[even:], start[even:]):
        return (
            f"the last {size - even} never change; {size} weights on {num_members} ranks are shards of {shard}",
            "tail",
        )
    if _near(got, _train(case, _sum)[step], step).all():
        return f"this is AdamW on the sum of the {num_members} gradients, and the step uses their mean", "mean"
    if _near(got, _train(case, _own)[step], step).all():
        return "each shard moved by its owner's gradient alone, and the step uses the mean of all", "mean"
    if step and _near(got, _train(case, forget=True)[step], step).all():
        return f"this AdamW has forgotten step {step} at step {step + 1}, and `state` lives across steps", "state"
    return f"{int(np.sum(~near))} of {size} weights differ from AdamW on the mean gradient", "shard"


def _near(got: Numbers, wanted: Numbers, step: int) -> npt.NDArray[np.bool_]:
    """Which weights are right: equal, or one last digit off for each step.

    AdamW's forms (plain, fused, on a GPU, here) may round otherwise, once a step: weights from 0.5 on are so large
    beside a step that no more can come of it. Every mistake is a hundred times as far away.
    """
    return np.asarray(np.abs(got - wanted) <= (step + 1) * np.spacing(wanted))


def _kept(case: Case, values: Sequence[Any], measures: list[Measure]) -> Finding:
    """Whether every rank keeps a shard of the optimizer's state, and no more."""
    size, num_members = case.inputs["size"], len(case.members)
    shard = -(-size // num_members)
    kept, rank = max((step["kept"], rank) for rank, value in enumerate(values) for step in value["steps"])
    measure = Measure(name="numbers that a rank keeps between steps", value=kept, budget=KEPT_PER_WEIGHT * shard)
    measures = [*measures, measure]
    if measure.kept:
        return Finding(passed=True, measures=tuple(measures))
    return _finding(
        case,
        f"rank {rank} of {num_members} keeps {kept} numbers between steps, and {measure.budget} are enough: "
        f"two averages and a copy of the weights for its shard of {shard} of {size}",
        got=f"{kept} numbers",
        wanted=f"at most {measure.budget}",
        idea="kept",
        measures=measures,
    )


def _traffic(case: Case, values: Sequence[Any], measures: list[Measure]) -> Finding:
    """What the ranks sent; it decides in the cases of that criterion, and is told in the others."""
    size, num_members = case.inputs["size"], len(case.members)
    calls = max((step["calls"] for value in values for step in value["steps"]), key=lambda c: _sent(c, num_members))
    sent, most = _sent(calls, num_members), 2 * (num_members - 1) * -(-size // num_members) * 4
    decides = case.criterion == "traffic"
    measures = [
        *measures,
        Measure(name="bytes that a rank sends in a step", value=sent, budget=most if decides else None, unit="B"),
    ]
    if sent <= most or not decides:
        return Finding(passed=True, measures=tuple(measures))
    names = " + ".join(str(one[0]) for one in calls if one[0] not in _SILENT)
    return _finding(
        case,
        f"a rank of {num_members} sends {sent:g} B in a step by {names}, and {most} B are enough: "
        f"2(N-1)/N of {4 * size} B of gradients",
        got=f"{sent:g} B by {names}",
        wanted=f"at most {most} B",
        idea="traffic",
        measures=measures,
    )


def _sent(calls: Sequence[Sequence[Any]], num_members: int) -> float:
    """Bytes that one rank sends, in the account of a ring."""
    shares = {name: share * (num_members - 1) / num_members for name, share in _RING.items()}
    return float(sum(shares.get(name, 1) * num_bytes for name, num_bytes, _ in calls if name not in _SILENT))


def _finding(case: Case, message: str, **fields: Any) -> Finding:
    """A finding that did not pass."""
    inputs = case.inputs
    adamw = ", ".join(f"{name} {value}" for name, value in inputs["adamw"].items())
    given = f"{inputs['size']} weights on {len(case.members)} ranks, {inputs['num_steps']} steps of AdamW ({adamw})"
    fields["measures"] = tuple(fields.get("measures", ()))
    return Finding(passed=False, message=f"{message}.", given=given, **fields)


def _place(rank: int, values: Sequence[Any], step: int) -> str:
    return f"after step {step + 1} on rank {rank} of {len(values)}"


def _form(told: Mapping[str, Any]) -> str:
    return f"has shape {told['shape']}" if "shape" in told else f"is a {told.get('type')}"


def _shown(numbers: Numbers) -> str:
    """The first numbers of a list."""
    text = ", ".join(f"{one:.6g}" for one in numbers[:6])
    return f"[{text}, ... {len(numbers)} in all]" if len(numbers) > 6 else f"[{text}]"


_CRITERIA = (
    Criterion(name="step", points=2, text="one step is right when N divides the number of weights"),
    Criterion(name="steps", points=2, text="later steps are right too: the optimizer's state lives across steps"),
    Criterion(name="any", points=2, text="any number of weights, also fewer than ranks"),
    Criterion(name="sharded", points=2, text="each rank keeps the optimizer's state of its own shard only"),
    Criterion(name="traffic", points=2, text="no more bytes than an all-reduce of the gradients: 2(N-1)/N"),
)

_IDEAS = {
    "place": Idea(
        first="The caller holds one tensor `weights`, and looks into that same tensor after the step.",
        further="End with an operation that writes into it, such as `weights.copy_(...)`.",
    ),
    "mean": Idea(
        first="Every member has computed gradients on its own samples; the step of all of them together uses the mean.",
        further="A reduce_scatter gives each member the sum over all members of its shard: divide it by their number. "
        "With ordinary gradients AdamW would hide the factor, since it divides by their size.",
    ),
    "tail": Idea(
        first="When N does not divide n, shards of n // N leave some weights without an owner.",
        further="Shards of ceil(n / N) cover every weight; pad gradients and weights with zeros to N such shards, and "
        "cut the padding off at the end.",
    ),
    "state": Idea(
        first="AdamW's averages and its count of steps belong to the training, not to one call.",
        further="Make the optimizer when `state` is empty, keep it in `state`, and use that one from then on.",
    ),
    "shard": Idea(
        first="Each rank gets the mean gradient of its shard, steps on that shard, and gives it to all.",
        further="Print the shard's first and last index on every rank, and the mean gradient that it got there.",
    ),
    "kept": Idea(
        first="ZeRO's gain is that nobody keeps what only the owner of a shard needs.",
        further="Give the optimizer a tensor of the shard's size: AdamW's averages have the size of what they are for. "
        "A slice keeps the whole tensor alive behind it: `.clone()` what you keep.",
    ),
    "traffic": Idea(
        first="An all_reduce is a reduce_scatter and an all_gather: which half does the owner of a shard need?",
        further="Each rank steps on its own shard, so it needs the sum of that shard only: reduce_scatter the "
        "gradients, all_gather the weights.",
    ),
    "raised": Idea(
        first="reduce_scatter takes a list of N tensors, one for each member, and fills one tensor; all_gather takes "
        "one tensor and fills a list of N. All of them have the same size, and no gradients recorded.",
        further="Pad to N shards of ceil(n / N) before you communicate: `list(padded.chunk(N))` is such a list. "
        "Communicate `shard.detach()`.",
    ),
    "timeout": Idea(
        first="A collective is a meeting: every member calls the same ones in the same order.",
        further="Look for a collective behind an `if` that not all members take, such as one about an empty shard.",
    ),
    "lost": Idea(
        first="The process of a rank ended.",
        further="Try the step on few weights first; does something call exit, or take all the memory?",
    ),
    "unsolved": Idea(
        first="Nothing is written yet.",
        further="Begin with the mean gradient of your own shard: one reduce_scatter.",
    ),
    "missing": Idea(
        first="The grader looks for a function of this very name.", further="Run the cell that defines zero1_step."
    ),
}

ZERO1_STEP = Exercise(
    question="02.1",
    title="a ZeRO-1 step: AdamW with its state sharded",
    chapter="02_data_parallel",
    answers=("zero1_step",),
    criteria=_CRITERIA,
    cases=_cases,
    judge=_judge,
    ideas=_IDEAS,
)
