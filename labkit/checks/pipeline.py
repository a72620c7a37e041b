"""Chapter 04: a 1F1B schedule, as text."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from labkit import predict
from labkit.errors import PlanError
from labkit.exercise import Case, Criterion, Exercise, Finding, Idea, Measure
from labkit.schedule import Action, check_order, gpipe, num_in_flight, parse, read

__all__ = ["ONE_F_ONE_B"]

EMIT = "labkit.rank.trials.schedule:emit"
EXECUTE = "labkit.rank.trials.schedule:execute"
FORWARD, BACKWARD = 1, 2
WIDTH, SAMPLES = 3, 2
MAX_SHOWN = 12

Sizes = list[list[int]]


class _Wrong(Exception):
    """What is wrong with a schedule: what a finding says of it."""

    def __init__(self, message: str, idea: str, *, got: str = "", wanted: str = "", measure: Measure | None = None):
        super().__init__(message)
        self.message, self.idea, self.got, self.wanted = message, idea, got, wanted
        self.measures = () if measure is None else (measure,)


def _cases(seed: int) -> tuple[Case, ...]:
    draw = random.Random(seed)
    large = [[stages, stages + draw.randint(0, 9)] for stages in (3, draw.randint(5, 9), 16)]
    few = [[stages, draw.randint(1, stages - 1)] for stages in (3, draw.randint(5, 9), 16)]
    several: Sizes = [[2, 2], [2, 4], [3, 5], [4, 8]]
    return (
        _emit("more micro-batches than stages", "complete", several),
        _emit("micro-batches in flight", "memory", several),
        _emit("time of a step", "time", several),
        _emit("one stage, or fewer micro-batches than stages", "any", [[1, 1], [1, 3], [2, 1], [3, 2], [4, 2]]),
        _execute("2 ranks, 3 micro-batches", "run", (0, 1), 3, 1),
        _execute("4 ranks, 6 micro-batches", "run", (0, 1, 2, 3), 6, 2),
        _emit("larger schedules", "complete", large, hidden=True),
        _emit("micro-batches in flight, larger", "memory", large, hidden=True),
        _emit("time of a step, larger", "time", large, hidden=True),
        _emit("few micro-batches, larger", "any", [[1, draw.randint(4, 9)], *few], hidden=True),
        _execute("4 ranks, 2 micro-batches", "any", (0, 1, 2, 3), 2, seed, hidden=True),
        _execute("2 ranks in another order", "run", (3, 1), draw.randint(2, 6), seed + 1, hidden=True),
        _execute("3 ranks in another order", "run", (2, 0, 3), draw.randint(3, 7), seed + 2, hidden=True),
    )


def _emit(name: str, criterion: str, sizes: Sizes, *, hidden: bool = False) -> Case:
    return Case(name=name, criterion=criterion, trial=EMIT, members=(0,), inputs={"sizes": sizes}, hidden=hidden)


def _execute(
    name: str, criterion: str, members: tuple[int, ...], num_microbatches: int, seed: int, *, hidden: bool = False
) -> Case:
    inputs = {"num_microbatches": num_microbatches, "seed": seed}
    return Case(name=name, criterion=criterion, trial=EXECUTE, members=members, inputs=inputs, hidden=hidden)


def _judge(case: Case, values: tuple[Any, ...]) -> Finding:
    if case.trial == EXECUTE:
        return _judge_run(case, values)
    measures: tuple[Measure, ...] = ()
    for (num_stages, num_microbatches), told in zip(case.inputs["sizes"], values[0], strict=True):
        try:
            measures = _check(case.criterion, told, num_stages, num_microbatches)
        except _Wrong as wrong:
            return _finding(wrong, num_stages, num_microbatches)
    return Finding(passed=True, measures=measures)


def _finding(wrong: _Wrong, num_stages: int, num_microbatches: int) -> Finding:
    sizes = f"{_count(num_stages, 'stage')}, {_count(num_microbatches, 'micro-batch')}"
    return Finding(
        passed=False,
        message=f"{sizes}: {wrong.message}",
        given=f"one_f_one_b({num_stages}, {num_microbatches})",
        got=wrong.got,
        wanted=wrong.wanted,
        idea=wrong.idea,
        measures=wrong.measures,
    )


def _check(criterion: str, told: Mapping[str, Any], num_stages: int, num_microbatches: int) -> tuple[Measure, ...]:
    """Check one schedule for one criterion; returns what was measured.

    Raises:
        _Wrong: what is wrong with it.
    """
    actions = _read(told, num_stages, num_microbatches)
    if criterion in ("complete", "any"):
        _check_order(actions)
    measures = []
    if criterion in ("memory", "any"):
        measures.append(_check_memory(actions))
    if criterion in ("time", "any"):
        measures.append(_check_time(actions, num_microbatches))
    return tuple(measures)


def _read(told: Mapping[str, Any], num_stages: int, num_microbatches: int) -> list[list[Action]]:
    if "lists" not in told:
        refused = f"{told['refused']!s:.200}"
        raise _Wrong(refused if refused.endswith("?") else f"{refused}.", "form")
    lists = told["lists"]
    _check_texts(lists, "few" if num_microbatches < num_stages else "form")
    try:
        actions = read(lists, num_stages, num_microbatches)
    except PlanError as error:
        raise _Wrong(str(error), _idea(lists, num_stages, num_microbatches), got=_shown(lists)) from None
    for stage, line in enumerate(actions):
        if other := next((action for action in line if action.kind not in ("F", "B")), None):
            message = f"list {stage} holds {other}: 1F1B is made of forwards F and whole backwards B."
            raise _Wrong(message, "form", got=_shown(lists))
    return actions


def _check_texts(lists: Sequence[Sequence[str]], idea: str) -> None:
    """Refuse what is no action at all: `read` would speak of kinds that 1F1B has no use for."""
    for stage, line in enumerate(lists):
        for text in line:
            try:
                parse(text)
            except PlanError:
                raise _Wrong(
                    f"list {stage} holds {text!r}: an action is a stage, F or B, and a micro-batch, counted from 0, "
                    f"such as '{stage}F0'.",
                    idea,
                    got=_shown(lists),
                ) from None


def _check_order(actions: list[list[Action]]) -> None:
    try:
        check_order(actions)
    except PlanError as error:
        raise _Wrong(str(error), "order", got=_lines(actions)) from None


def _idea(lists: Sequence[Sequence[str]], num_stages: int, num_microbatches: int) -> str:
    """What to think about where a schedule is refused."""
    actions = [[parse(text) for text in line] for line in lists]
    all_of_it = [action for line in actions for action in line]
    if num_microbatches < num_stages:
        return "few"
    if any(action.microbatch >= num_microbatches or action.stage >= num_stages for action in all_of_it):
        return "counted"
    if any(action.stage != stage for stage, line in enumerate(actions) for action in line):
        return "stage"
    wanted = sorted(action for line in gpipe(num_stages, num_microbatches) for action in line)
    # All actions are there, so they wait for each other.
    return "deadlock" if sorted(all_of_it) == wanted else "complete"


def _check_memory(actions: list[list[Action]]) -> Measure:
    num_stages = len(actions)
    for stage, line in enumerate(actions):
        held, most = num_in_flight(line), num_stages - stage
        measure = Measure(name=f"micro-batches in flight on stage {stage} of {num_stages}", value=held, budget=most)
        if held > most:
            raise _Wrong(
                f"stage {stage} has {held} micro-batches in flight at once, and 1F1B has at most P - s = {most} there.",
                "memory",
                got=_lines([line]),
                wanted=f"at most {most} forwards ahead of the backwards, on every stage s at most P - s",
                measure=measure,
            )
    return Measure(
        name=f"micro-batches in flight on stage 0 of {num_stages}", value=num_in_flight(actions[0]), budget=num_stages
    )


def _check_time(actions: list[list[Action]], num_microbatches: int) -> Measure:
    num_stages = len(actions)
    ideal = (num_microbatches + num_stages - 1) * (FORWARD + BACKWARD)
    took = predict.timeline(actions, FORWARD, BACKWARD).step_time_s
    measure = Measure(
        name=f"time of {_count(num_microbatches, 'micro-batch')} on {_count(num_stages, 'stage')}",
        value=took,
        budget=ideal,
    )
    if took > ideal:
        stage, num_warmup = _starved(actions)
        raise _Wrong(
            f"the step takes {took:g} where (m + P - 1) * (tf + tb) = {ideal} is enough (tf = 1, tb = 2): stage "
            f"{stage} begins its first backward after {_count(num_warmup, 'forward')} and then waits.",
            "time",
            got=_lines([actions[stage]]),
            wanted=f"a step of {ideal}",
            measure=measure,
        )
    return measure


def _starved(actions: list[list[Action]]) -> tuple[int, int]:
    """The first stage that runs fewer forwards ahead than it may, and how many: its neighbours wait for it."""
    num_stages = len(actions)
    ahead = [next(place for place, action in enumerate(line) if action.kind == "B") for line in actions]
    late = [stage for stage in range(num_stages) if ahead[stage] < min(num_stages - stage, len(actions[stage]) // 2)]
    stage = late[0] if late else 0
    return stage, ahead[stage]


def _judge_run(case: Case, values: tuple[Any, ...]) -> Finding:
    num_stages, num_microbatches = len(case.members), case.inputs["num_microbatches"]
    try:
        actions = _read(values[0], num_stages, num_microbatches)
        _check_order(actions)
        loss, gradients = _unsplit(num_stages, num_microbatches, case.inputs["seed"])
        for stage, (line, value) in enumerate(zip(actions, values, strict=True)):
            if value["ran"] != [str(action) for action in line]:
                raise _Wrong(f"stage {stage} ran other actions than its list.", "run", got=_shown([value["ran"]]))
            if value["gradient"] != gradients[stage]:
                raise _Wrong(
                    f"stage {stage} has another gradient than the unsplit model.",
                    "run",
                    got=str(value["gradient"]),
                    wanted=str(gradients[stage]),
                )
        if values[-1]["loss"] != loss:
            raise _Wrong(f"the loss is {values[-1]['loss']:g}, that of the unsplit model {loss:g}.", "run")
    except _Wrong as wrong:
        return _finding(wrong, num_stages, num_microbatches)
    name = f"micro-batches that stage 0 of {num_stages} held on live ranks"
    return Finding(passed=True, measures=(Measure(name=name, value=values[0]["most_held"]),))


def _unsplit(num_stages: int, num_microbatches: int, seed: int) -> tuple[float, list[list[float]]]:
    """Loss and gradient of every layer of the model that the trial cuts into stages: h -> h W^T, squared error."""
    index = np.arange(WIDTH * WIDTH)
    weights = [((index * 7 + stage * 3 + seed) % 5 - 2.0).reshape(WIDTH, WIDTH) for stage in range(num_stages)]
    place = np.arange(num_microbatches * SAMPLES * WIDTH)
    stream = [((place * 5 + seed) % 7 - 3.0).reshape(-1, WIDTH)]
    for weight in weights:
        stream.append(stream[-1] @ weight.T)
    error = stream[-1] - ((place * 3 + seed) % 5 - 2.0).reshape(-1, WIDTH)
    gradient, gradients = 2 * error, []
    for weight, entered in zip(reversed(weights), reversed(stream[:-1]), strict=True):
        gradients.append((gradient.T @ entered).flatten().tolist())
        gradient = gradient @ weight
    return float((error**2).sum()), gradients[::-1]


def _count(number: int, name: str) -> str:
    plural = "es" if name.endswith("ch") else "s"
    return f"{number} {name}{plural if number != 1 else ''}"


def _lines(actions: Sequence[Sequence[Action]]) -> str:
    return _shown([[str(action) for action in line] for line in actions])


def _shown(lists: Sequence[Sequence[str]]) -> str:
    return "\n".join(" ".join([*line[:MAX_SHOWN], *(["..."] if len(line) > MAX_SHOWN else [])]) for line in lists[:8])


_IDEAS = {
    "form": Idea(
        first="A schedule is plain data: a list with one list for each stage, and in it texts such as '2F0'.",
        further='Write the stage, then F or B, then the micro-batch, all counted from 0: f"{stage}F{microbatch}".',
    ),
    "counted": Idea(
        first="Stages and micro-batches are counted from 0: of m micro-batches, the last is m - 1.",
        further="range(m) gives 0 to m - 1. Look for a range that begins at 1, or for a + 1 in a text.",
    ),
    "stage": Idea(
        first="Every stage has a list of its own: list s holds only actions that begin with s.",
        further="The lists differ in more than the stage's number: later stages run fewer forwards first.",
    ),
    "few": Idea(
        first="With fewer micro-batches than stages, the first stages run out of forwards before their first backward.",
        further="No stage can run more forwards ahead than there are micro-batches: take the smaller of two numbers.",
    ),
    "complete": Idea(
        first="Every stage runs the forward and the backward of every micro-batch exactly once.",
        further="A stage's list has 2 m entries. Count them, and look at its end: when the forwards are used up, "
        "the backwards of the micro-batches in flight are still to be run.",
    ),
    "order": Idea(
        first="Micro-batches leave the pipeline in the order in which they entered it.",
        further="The backward that comes next is that of the oldest micro-batch in flight, not of the newest.",
    ),
    "deadlock": Idea(
        first="A forward needs the forward of the stage before, a backward needs its own forward and the backward of "
        "the stage behind.",
        further="Follow micro-batch 0 by hand: down all stages, then up again. What must each stage have run before?",
    ),
    "memory": Idea(
        first="A micro-batch is in flight from its forward to its backward: so long, its activations stay in memory.",
        further="How many forwards does stage s run before its first backward? The last stage can turn round at once; "
        "each stage before it runs one more.",
    ),
    "time": Idea(
        first="A stage that has too few micro-batches in flight waits for gradients while it could run a forward.",
        further="Micro-batch 0 comes back to stage s after it went through all the stages behind it and back. How many "
        "forwards fit in before that?",
    ),
    "run": Idea(
        first="Torch's own runtime adds sends and receives to your lists and runs them as they are.",
        further="It runs only what is complete, in order and free of deadlock: mend what the other cases say first.",
    ),
    "raised": Idea(
        first="The function must work for every number of stages and micro-batches, also for 1 of each.",
        further="Call it in a cell of its own with the numbers of the case, and read the line that raised.",
    ),
    "timeout": Idea(
        first="The function only makes lists; it talks to no other rank, so only a loop without end can take long.",
        further="Look at your while loops: does what they wait for change in every round?",
    ),
    "lost": Idea(
        first="The function only makes lists; nothing in it should end a process.",
        further="Look for exit calls, and for lists that grow without end.",
    ),
    "unsolved": Idea(
        first="Draw the schedule for 2 stages and 3 micro-batches on paper first, one line per stage.",
        further="Each line has three parts: forwards only, then forward and backward in turn, then backwards only.",
    ),
    "missing": Idea(
        first="The function is called one_f_one_b and takes the number of stages and of micro-batches.",
        further="Run the cell that defines it.",
    ),
}

ONE_F_ONE_B = Exercise(
    question="04.1",
    title="a 1F1B schedule",
    chapter="04_pipeline",
    answers=("one_f_one_b",),
    criteria=(
        Criterion(name="complete", points=2, text="every action once, in order, and no stage waits for ever"),
        Criterion(name="memory", points=3, text="stage s of P never has more than P - s micro-batches in flight"),
        Criterion(name="time", points=2, text="the step is as short as it can be: (m + P - 1) (tf + tb)"),
        Criterion(name="any", points=2, text="all of that with one stage and with fewer micro-batches than stages"),
        Criterion(name="run", points=1, text="torch runs it on live ranks, with the gradients of the unsplit model"),
    ),
    cases=_cases,
    judge=_judge,
    ideas=_IDEAS,
)
