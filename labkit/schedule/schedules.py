"""Pipeline schedules as lists of actions, one list per rank."""

from collections.abc import Callable

from labkit.errors import PlanError
from labkit.schedule.action import Action
from labkit.schedule.interleaved import interleaved, interleaved_zero_bubble, looped_bfs
from labkit.schedule.v_shaped import dualpipe_v, zbv
from labkit.spec.checks import choice, whole

__all__ = [
    "BUILDERS",
    "INTERLEAVED",
    "V_SHAPED",
    "add_communication",
    "build",
    "check_virtual_stages",
    "gpipe",
    "num_in_flight",
    "one_f_one_b",
    "stages_of",
]

INTERLEAVED = ("interleaved", "looped_bfs", "interleaved_zero_bubble")
"""Schedules in which rank r of p holds stages r, r + p, r + 2p, ..."""

V_SHAPED = ("zbv", "dualpipe_v")
"""Schedules in which rank r of p holds stages r and 2p - 1 - r."""


def gpipe(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    Every stage holds all `num_microbatches` activations at once.

    Returns:
        One list per rank; rank r holds stage r.

    Raises:
        PlanError: a number below 1 or no integer.

    >>> from labkit.schedule import format_actions
    >>> print(format_actions(gpipe(2, 2)))
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    """
    num_stages, num_microbatches = whole("num_stages", num_stages), whole("num_microbatches", num_microbatches)
    return [
        [Action(stage, kind, microbatch) for kind in ("F", "B") for microbatch in range(num_microbatches)]
        for stage in range(num_stages)
    ]


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """A few forwards to fill the pipeline, then one backward for each forward (Narayanan et al. 2019, PipeDream-Flush).

    Same bubble as gpipe, but stage s holds only `min(num_stages - s, num_microbatches)` activations.

    Returns:
        One list per rank; rank r holds stage r.

    Raises:
        PlanError: a number below 1 or no integer.

    >>> from labkit.schedule import format_actions
    >>> print(format_actions(one_f_one_b(2, 3)))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    num_stages, num_microbatches = whole("num_stages", num_stages), whole("num_microbatches", num_microbatches)
    ranks = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - stage, num_microbatches)
        actions = [Action(stage, "F", microbatch) for microbatch in range(num_warmup)]
        for microbatch in range(num_microbatches):
            actions.append(Action(stage, "B", microbatch))
            if microbatch + num_warmup < num_microbatches:
                actions.append(Action(stage, "F", microbatch + num_warmup))
        ranks.append(actions)
    return ranks


BUILDERS: dict[str, Callable[[int, int, int], list[list[Action]]]] = {
    "gpipe": lambda num_ranks, num_microbatches, _: gpipe(num_ranks, num_microbatches),
    "1f1b": lambda num_ranks, num_microbatches, _: one_f_one_b(num_ranks, num_microbatches),
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "zbv": lambda num_ranks, num_microbatches, _: zbv(num_ranks, num_microbatches),
    "dualpipe_v": lambda num_ranks, num_microbatches, _: dualpipe_v(num_ranks, num_microbatches),
}
"""Layout's name of a schedule -> what makes it from ranks, micro-batches and stages per rank."""


def build(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> list[list[Action]]:
    """Return the schedule of that name, for so many stages per rank.

    Raises:
        PlanError: an unknown name, a number below 1, or sizes that the schedule does not take.

    >>> build("1f1b", 4, 8) == one_f_one_b(4, 8)
    True
    >>> build("zbv", 4, 8, 2) == zbv(4, 8)
    True
    """
    builder = BUILDERS[choice("schedule", name, tuple(BUILDERS))]
    check_virtual_stages(name, num_virtual_stages)
    return builder(num_ranks, num_microbatches, num_virtual_stages)


def check_virtual_stages(name: str, num_virtual_stages: int) -> None:
    """Check that the schedule of that name can have so many stages per rank.

    Raises:
        PlanError: it cannot.

    >>> check_virtual_stages("zbv", 3)
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: num_virtual_stages=3 with schedule='zbv': a V has two stages per rank. Use v2.
    """
    given = f"num_virtual_stages={num_virtual_stages} with schedule={name!r}"
    if name in ("gpipe", "1f1b") and num_virtual_stages != 1:
        raise PlanError(f"{given}: that schedule has one stage per rank. Use v1.")
    if name in V_SHAPED and num_virtual_stages != 2:
        raise PlanError(f"{given}: a V has two stages per rank. Use v2.")
    if name in INTERLEAVED and num_virtual_stages < 2:
        raise PlanError(f"{given}: it interleaves stages of one rank, 2 or more. Use v2.")


def stages_of(name: str, rank: int, num_ranks: int, num_virtual_stages: int) -> list[int]:
    """Return the stages that a pipeline rank holds under the schedule of that name.

    >>> stages_of("interleaved", 1, 4, 2), stages_of("zbv", 1, 4, 2)
    ([1, 5], [1, 6])
    """
    if name in V_SHAPED:
        return [rank, 2 * num_ranks - 1 - rank]
    return list(range(rank, num_ranks * num_virtual_stages, num_ranks))


def add_communication(actions: list[list[Action]]) -> list[list[Action]]:
    """Insert sends right after the compute that makes a value, and receives right before the compute that needs it.

    The result is free of deadlock when sends are buffered, which `validate` assumes too. Stages are those named in
    `actions`; two stages of one rank exchange nothing.

    >>> from labkit.schedule import format_actions
    >>> print(format_actions(add_communication(gpipe(2, 1))))
    0F0 0SEND_F0 0RECV_B0 0B0
    1RECV_F0 1F0 1B0 1SEND_B0
    """
    rank_of = {action.stage: rank for rank, line in enumerate(actions) for action in line}

    def crosses(stage: int, other: int) -> bool:
        return other in rank_of and rank_of[other] != rank_of[stage]

    result = []
    for line in actions:
        lowered = []
        for action in line:
            stage, microbatch = action.stage, action.microbatch
            forward, gradient = action.kind == "F", action.kind in ("B", "I")
            source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            letter = "F" if forward else "B"
            moves = forward or gradient
            if moves and crosses(stage, source):
                lowered.append(Action(stage, f"RECV_{letter}", microbatch))
            lowered.append(action)
            if moves and crosses(stage, target):
                lowered.append(Action(stage, f"SEND_{letter}", microbatch))
        result.append(lowered)
    return result


def num_in_flight(actions: list[Action]) -> int:
    """Return the most micro-batches whose activations one rank holds at once: forward done, backward not.

    >>> [num_in_flight(line) for line in one_f_one_b(4, 8)]
    [4, 3, 2, 1]
    >>> [num_in_flight(line) for line in gpipe(4, 8)]
    [8, 8, 8, 8]
    """
    held = peak = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak
