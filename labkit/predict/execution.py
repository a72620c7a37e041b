"""A schedule on a clock: when every action of it starts, from durations and from what each action needs."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from labkit.errors import PlanError
from labkit.schedule import V_SHAPED, Action, build, stages_of

__all__ = ["Totals", "execute", "totals"]

FULL_AFTER = 24
"""Micro-batches after which a pipeline goes on evenly, or a round of one for each rank; in a V twice as many."""


def execute(
    lines: Sequence[Sequence[Action]], seconds: Mapping[str, Sequence[float]], sends_s: Sequence[float]
) -> list[list[float]]:
    """Return the start of every action in seconds, line by line: each begins as soon as its line and its inputs allow.

    A forward needs the stage before, a backward (or its first half, `I`) its own forward and the stage behind, a `W`
    its own `I`. Results travel while both sides go on computing.

    Args:
        lines: the computations of each pipeline rank in order.
        seconds: kind -> seconds of it for each stage.
        sends_s: seconds from stage s to s + 1, and back, for each s; 0 where both are on one rank.

    Raises:
        PlanError: the schedule stops half-way.

    >>> from labkit.schedule import one_f_one_b
    >>> execute(one_f_one_b(2, 1), {"F": [1.0, 1.0], "B": [2.0, 2.0]}, [0.5])
    [[0.0, 5.0], [1.5, 2.5]]
    """
    last = len(sends_s)
    forwards: list[dict[int, float]] = [{} for _ in range(last + 1)]
    backwards: list[dict[int, float]] = [{} for _ in range(last + 1)]
    starts: list[list[float]] = [[] for _ in lines]
    free_s = [0.0] * len(lines)
    remaining = sum(len(line) for line in lines)
    while remaining:
        before = remaining
        for rank, line in enumerate(lines):
            own, at_s = starts[rank], free_s[rank]
            for position in range(len(own), len(line)):
                action = line[position]
                stage, kind, microbatch = action.stage, action.kind, action.microbatch
                done = forwards[stage]
                if kind == "F":
                    ready_s = forwards[stage - 1].get(microbatch) if stage else 0.0
                    travel_s = sends_s[stage - 1] if stage else 0.0
                elif microbatch not in done or (kind == "W" and microbatch not in backwards[stage]):
                    break
                else:
                    done, inner = backwards[stage], kind != "W" and stage < last
                    ready_s = backwards[stage + 1].get(microbatch) if inner else 0.0
                    travel_s = sends_s[stage] if inner else 0.0
                if ready_s is None:
                    break
                ready_s += travel_s
                if ready_s > at_s:
                    at_s = ready_s
                own.append(at_s)
                at_s += seconds[kind][stage]
                if kind != "W":
                    done[microbatch] = at_s
                remaining -= 1
            free_s[rank] = at_s
        if remaining == before:
            raise PlanError("the schedule stops half-way: check its actions with schedule.validate.")
    return starts


class Totals(NamedTuple):
    """What a schedule takes, without its actions.

    Attributes:
        ends_s: when each pipeline rank has ended its last computation.
        busy_s: how long each computes.
    """

    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle over total, between the first start and the last end.

        >>> Totals((2.0, 4.0), (2.0, 2.0)).bubble_fraction
        0.5
        """
        total = max(self.ends_s) * len(self.ends_s)
        return 1.0 - sum(self.busy_s) / total if total else 0.0


def totals(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    num_virtual_stages: int,
    seconds: Mapping[str, Sequence[float]],
    sends_s: Sequence[float],
) -> Totals:
    """Return what a schedule of that name takes.

    A long one is executed for a few rounds of micro-batches: once its pipeline is full, every further round of as many
    micro-batches as there are ranks takes as long as the one before.

    Args:
        schedule: one of `labkit.schedule.BUILDERS`.
        num_ranks: ranks of the pipeline.
        num_microbatches: of a step.
        num_virtual_stages: stages of a rank.
        seconds: "F", "I" and "W" -> seconds of each stage; a whole backward takes I and W.
        sends_s: as in `execute`.

    >>> ones = {"F": [1.0] * 4, "I": [1.0] * 4, "W": [1.0] * 4}
    >>> found = totals("1f1b", 4, 1000, 1, ones, [0.0] * 3)
    >>> max(found.ends_s), round(found.bubble_fraction, 6) == round(3 / 1003, 6)
    (3009.0, True)
    """
    kinds = [tuple(seconds[kind]) for kind in "FIW"]
    return _totals(schedule, num_ranks, num_microbatches, num_virtual_stages, *kinds, tuple(sends_s))


@lru_cache(maxsize=256)
def _totals(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    num_virtual_stages: int,
    forward_s: tuple[float, ...],
    inputs_s: tuple[float, ...],
    weights_s: tuple[float, ...],
    sends_s: tuple[float, ...],
) -> Totals:
    backward_s = [first + second for first, second in zip(inputs_s, weights_s, strict=True)]
    seconds = {"F": forward_s, "B": backward_s, "I": inputs_s, "W": weights_s}
    stage_s = [first + second for first, second in zip(forward_s, backward_s, strict=True)]

    held = [stages_of(schedule, rank, num_ranks, num_virtual_stages) for rank in range(num_ranks)]
    busy_s = tuple(num_microbatches * sum(stage_s[stage] for stage in stages) for stages in held)
    if num_ranks == 1 and num_virtual_stages == 1:
        return Totals(busy_s, busy_s)
    rounds = max(1, FULL_AFTER // num_ranks) * (2 if schedule in V_SHAPED else 1)
    short = rounds * num_ranks + num_microbatches % num_ranks
    if num_microbatches <= short + num_ranks:
        lines = _lines(schedule, num_ranks, num_microbatches, num_virtual_stages)
        return Totals(_ends_s(lines, seconds, sends_s), busy_s)
    lines = _lines(schedule, num_ranks, short + num_ranks, num_virtual_stages)
    after = _ends_s(lines, seconds, sends_s)
    before = _ends_s([[each for each in line if each.microbatch < short] for line in lines], seconds, sends_s)
    more = (num_microbatches - short) // num_ranks
    return Totals(tuple(first + more * (second - first) for first, second in zip(before, after, strict=True)), busy_s)


_lines = lru_cache(maxsize=16)(build)
"""A schedule's order does not depend on durations, which change with every move of a slider."""


def _ends_s(
    lines: Sequence[Sequence[Action]], seconds: Mapping[str, Sequence[float]], sends_s: Sequence[float]
) -> tuple[float, ...]:
    """When the last computation of each line is over."""
    starts = execute(lines, seconds, sends_s)
    return tuple(start[-1] + seconds[line[-1].kind][line[-1].stage] for start, line in zip(starts, lines, strict=True))
