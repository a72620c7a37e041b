"""What a pipeline rank computes, in order, as far as its memory needs to know."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import zip_longest

from labkit.plan import Plan
from labkit.schedule import build as build_schedule

__all__ = ["Step", "steps"]

Step = tuple[int, str, int]
"""Stage, kind ("F", "B", "I" or "W") and micro-batch."""

_ROUNDS = 3


def steps(plan: Plan, pp_rank: int) -> Iterable[Step]:
    """Return a pp rank's actions, without those that only repeat what went before.

    Past the first rounds of a pipeline a rank holds no more than it did, so a long step costs no more to look at than a
    short one. Schedules whose split backwards make them irregular are taken from their actions, three rounds of them.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("pp2 m4096"))
    >>> list(steps(built, 0))
    [(0, 'F', 0), (0, 'F', 1), (0, 'B', 0), (0, 'F', 2), (0, 'B', 1), (0, 'F', 3), (0, 'B', 2)]
    """
    layout = plan.layout
    if plan.schedule is not None:
        return ((action.stage, action.kind, action.microbatch) for action in plan.schedule[pp_rank])
    p, m, v = layout.pp, layout.num_microbatches, layout.num_virtual_stages
    if layout.num_stages == 1 or layout.schedule == "1f1b":
        return _one_forward_one_backward(pp_rank, p, m)
    if layout.schedule in ("gpipe", "looped_bfs"):
        return _breadth_first(range(pp_rank, p * v, p), m, newest_first=layout.schedule == "looped_bfs")
    if layout.schedule == "interleaved":
        return _interleaved(pp_rank, p, m, v)
    return _from_actions(layout.schedule, p, min(m, _ROUNDS * p), v)[pp_rank]


def _one_forward_one_backward(stage: int, p: int, m: int) -> Iterator[Step]:
    """1F1B: as many forwards as stages are to come, then a backward and a forward in turn, three times."""
    num_warmup = min(p - stage, m)
    yield from ((stage, "F", index) for index in range(num_warmup))
    for index in range(min(m, 3)):
        yield stage, "B", index
        if index + num_warmup < m and index < 2:
            yield stage, "F", index + num_warmup


def _breadth_first(stages: range, m: int, *, newest_first: bool) -> Iterator[Step]:
    """All forwards, then all backwards, of which the first two of each stage matter."""
    yield from ((stage, "F", index) for stage in stages for index in range(m))
    order = range(m)[::-1] if newest_first else range(m)
    yield from ((stage, "B", index) for stage in reversed(stages) for index in order)


def _interleaved(rank: int, p: int, m: int, v: int) -> Iterator[Step]:
    """Interleaved 1F1B: rounds of p micro-batches through a rank's v stages; v + 1 rounds of backwards see all."""
    num_warmup = min((v - 1) * p + 2 * (p - 1 - rank), v * m)
    num_backwards = min((v + 1) * p, v * m)
    forwards = _turns("F", range(v), rank, p, min(num_warmup + num_backwards, v * m))
    backwards = _turns("B", range(v)[::-1], rank, p, num_backwards)
    yield from forwards[:num_warmup]
    for forward, backward in zip_longest(forwards[num_warmup:], backwards):
        if forward is not None:
            yield forward
        yield backward


def _turns(kind: str, order: range, rank: int, p: int, num: int) -> list[Step]:
    """A rank's first `num` forwards or backwards: p micro-batches for each of its stages in turn."""
    cycles = range(-(-num // (p * len(order))))
    found = [(turn * p + rank, kind, cycle * p + place) for cycle in cycles for turn in order for place in range(p)]
    return found[:num]


@lru_cache(maxsize=64)
def _from_actions(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int) -> list[list[Step]]:
    lines = build_schedule(name, num_ranks, num_microbatches, num_virtual_stages)
    return [[(action.stage, action.kind, action.microbatch) for action in line] for line in lines]
