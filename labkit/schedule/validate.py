"""Checks that a schedule does every action once and that no rank waits for ever."""

from collections.abc import Container, Iterator, Sequence

from labkit.errors import PlanError
from labkit.schedule.action import COMPUTE, Action, parse
from labkit.spec.checks import shown, whole

__all__ = ["check_order", "dependencies", "inputs", "read", "validate"]


def validate(actions: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int) -> None:
    """Check that `actions` (one list per rank) is a schedule.

    Complete: every stage runs F and B (or I and W) of every micro-batch exactly once, all on one rank. Free of
    deadlock: run in order with buffered sends, every action's inputs arrive.

    Raises:
        PlanError: naming the first offending action, its rank, and what it waits for.

    >>> from labkit.schedule import one_f_one_b, parse_actions
    >>> validate(one_f_one_b(2, 2), 2, 2)
    >>> validate(parse_actions("0B0 0F0"), 1, 1)
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: rank 0 waits at 0B0 for 0F0: no rank can go on. Put 0F0 before 0B0 on rank 0.
    """
    num_stages, num_microbatches = whole("num_stages", num_stages), whole("num_microbatches", num_microbatches)
    rank_of = _check_each(actions, num_stages, num_microbatches)
    _check_complete(rank_of, num_stages, num_microbatches)
    _check_progress(actions, rank_of, num_stages)


def read(lists: Sequence[Sequence[str]], num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Read a schedule with one stage per rank, given as one list of texts for each stage, and check it.

    Returns:
        The actions, one list per stage.

    Raises:
        PlanError: not one list for each stage, a text that is no action, an action in the list of another stage, or
            what `validate` refuses.

    >>> [len(line) for line in read([["0F0", "0B0"], ["1F0", "1B0"]], 2, 1)]
    [2, 2]
    >>> read([["0F0", "0B0"], ["0F0", "0B0"]], 2, 1)
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: list 1 holds 0F0, an action of stage 0: list s holds the actions of stage s. Write 1F0.
    """
    if len(lists) != num_stages:
        count = f"{len(lists)} list{'s' * (len(lists) != 1)}"
        raise PlanError(f"{count} for num_stages={num_stages}: a schedule has one list for each stage.")
    actions = [[parse(text) for text in line] for line in lists]
    for stage, line in enumerate(actions):
        for action in line:
            if action.stage != stage:
                fix = Action(stage, action.kind, action.microbatch)
                raise PlanError(
                    f"list {stage} holds {action}, an action of stage {action.stage}: list s holds the actions of "
                    f"stage s. Write {fix}."
                )
    validate(actions, num_stages, num_microbatches)
    return actions


def check_order(actions: Sequence[Sequence[Action]]) -> None:
    """Check that every rank takes the micro-batches of a stage in order, forward and backward: first in, first out.

    Raises:
        PlanError: naming the first action that comes too early.

    >>> from labkit.schedule import parse_actions
    >>> check_order(parse_actions("0F0 0F1 0B1 0B0"))
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: rank 0 runs 0B1 before 0B0: micro-batches go in order, forward and backward alike.
    """
    for rank, line in enumerate(actions):
        expected: dict[tuple[int, str], int] = {}
        for action in line:
            microbatch = expected.setdefault((action.stage, action.kind), 0)
            if action.microbatch != microbatch:
                due = Action(action.stage, action.kind, microbatch)
                raise PlanError(
                    f"rank {rank} runs {action} before {due}: micro-batches go in order, forward and backward alike."
                )
            expected[action.stage, action.kind] += 1


def dependencies(action: Action, num_stages: int) -> list[Action]:
    """Return the computations that must be over before `action` starts.

    `F` needs the previous stage's `F`; `B` and `I` need their own `F` and the next stage's `B` or `I` (named `B` here);
    `W` needs its own `I`; a send needs what it sends, a receive needs the send.

    >>> [str(needed) for needed in dependencies(Action(1, "B", 0), 4)]
    ['1F0', '2B0']
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    needed: list[tuple[int, str]] = []
    match kind:
        case "F":
            needed = [(stage - 1, "F")]
        case "B" | "I":
            needed = [(stage, "F"), (stage + 1, "B")]
        case "W":
            needed = [(stage, "I")]
        case "SEND_F":
            needed = [(stage, "F")]
        case "SEND_B":
            needed = [(stage, "B")]
        case "RECV_F":
            needed = [(stage - 1, "SEND_F")]
        case "RECV_B":
            needed = [(stage + 1, "SEND_B")]
    return [Action(other, name, microbatch) for other, name in needed if 0 <= other < num_stages]


def inputs(action: Action, scheduled: Container[Action], num_stages: int) -> Iterator[Action]:
    """Yield what `action` needs in a schedule of these actions: `dependencies` as they are written there.

    `I` stands in for `B` where a backward is split, a receive for the other stage's result where there is one.

    >>> [str(needed) for needed in inputs(Action(0, "I", 0), {Action(1, "I", 0)}, 2)]
    ['0F0', '1I0']
    """
    for needed in dependencies(action, num_stages):
        if needed.stage != action.stage and action.kind in COMPUTE:
            received = Action(action.stage, f"RECV_{needed.kind}", action.microbatch)
            if received in scheduled:
                yield received
                continue
        if needed.kind == "B" and needed not in scheduled:
            yield Action(needed.stage, "I", needed.microbatch)
        else:
            yield needed


def _check_each(actions: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int) -> dict[Action, int]:
    rank_of: dict[Action, int] = {}
    home: dict[int, int] = {}
    for rank, line in enumerate(actions):
        for action in line:
            if not isinstance(action, Action):
                raise PlanError(f"rank {rank} holds {shown(action)}: a schedule holds actions. Use Action(0, 'F', 0).")
            where = f"rank {rank} holds {action}"
            if action.stage >= num_stages:
                raise PlanError(f"{where} but num_stages={num_stages}: stages end at {num_stages - 1}.")
            if action.microbatch >= num_microbatches:
                last = num_microbatches - 1
                raise PlanError(f"{where} but num_microbatches={num_microbatches}: micro-batches end at {last}.")
            if action in rank_of:
                raise PlanError(f"{where} and rank {rank_of[action]} holds it too: every action runs once. Drop one.")
            if home.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"{where} but rank {home[action.stage]} holds stage {action.stage}: a stage lives on one rank. "
                    f"Move {action} to rank {home[action.stage]}."
                )
            rank_of[action] = rank
    return rank_of


def _check_complete(rank_of: dict[Action, int], num_stages: int, num_microbatches: int) -> None:
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            has = {kind for kind in COMPUTE if Action(stage, kind, microbatch) in rank_of}
            if has in ({"F", "B"}, {"F", "I", "W"}):
                continue
            if "B" in has and has & {"I", "W"}:
                extra = Action(stage, "I" if "I" in has else "W", microbatch)
                raise PlanError(f"{extra} and {stage}B{microbatch} both run: B is I and W together. Drop one.")
            missing = "F" if "F" not in has else "W" if "I" in has else "I" if "W" in has else "B"
            raise PlanError(
                f"{stage}{missing}{microbatch} is missing: every stage runs F and B (or I and W) of every micro-batch. "
                f"Add it to stage {stage}'s rank."
            )


def _check_progress(actions: Sequence[Sequence[Action]], rank_of: dict[Action, int], num_stages: int) -> None:
    position = [0] * len(actions)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(actions):
            while position[rank] < len(line) and _waits_for(line[position[rank]], rank_of, done, num_stages) is None:
                done.add(line[position[rank]])
                position[rank] += 1
                moved = True
    blocked = {rank: line[position[rank]] for rank, line in enumerate(actions) if position[rank] < len(line)}
    if blocked:
        _raise_deadlock(blocked, rank_of, done, num_stages)


def _raise_deadlock(blocked: dict[int, Action], rank_of: dict[Action, int], done: set[Action], num_stages: int) -> None:
    """Follow who waits for whom until ranks repeat, and name that circle."""
    waits: dict[int, tuple[Action, Action]] = {}
    rank = min(blocked)
    while rank not in waits:
        action = blocked[rank]
        needed = _waits_for(action, rank_of, done, num_stages) or action
        if needed not in rank_of:
            raise PlanError(f"rank {rank} waits at {action} for {needed}, which no rank runs. Add {needed}.")
        waits[rank] = (action, needed)
        rank = rank_of[needed]
    ranks = list(waits)
    circle = ranks[ranks.index(rank) :]
    text = ", ".join(f"rank {each} waits at {waits[each][0]} for {waits[each][1]}" for each in circle)
    needed, owner = waits[circle[-1]][1], rank
    raise PlanError(f"{text}: no rank can go on. Put {needed} before {waits[owner][0]} on rank {owner}.")


def _waits_for(action: Action, rank_of: dict[Action, int], done: set[Action], num_stages: int) -> Action | None:
    return next((needed for needed in inputs(action, rank_of, num_stages) if needed not in done), None)
