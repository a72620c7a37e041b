"""Schedules of a pipeline that goes round its ranks several times: rank r holds stages r, r + p, r + 2p, ..."""

from collections import Counter

from labkit.errors import PlanError
from labkit.schedule.action import Action
from labkit.spec.checks import whole

__all__ = ["interleaved", "interleaved_zero_bubble", "looped_bfs"]


def interleaved(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> list[list[Action]]:
    """One forward, one backward, over several smaller stages per rank (Narayanan et al. 2021, arXiv 2104.04473).

    Micro-batches go in rounds of `num_ranks` through a rank's first stage, then its second, and so on. Filling the
    pipeline takes `num_virtual_stages` times less than with 1f1b, for as many more messages and some more activations.

    Returns:
        One list per rank; rank r holds stages r, r + num_ranks, ...

    Raises:
        PlanError: a number below 1 or no integer, or micro-batches that are no whole rounds.

    >>> from labkit import predict, schedule
    >>> print(schedule.format_actions(interleaved(2, 2)))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    >>> [schedule.num_in_flight(line) for line in interleaved(4, 8)]
    [11, 9, 7, 5]
    >>> round(predict.timeline(interleaved(4, 8), 1.0, 2.0).bubble_fraction, 4)  # (p - 1) / (v m + p - 1)
    0.1579
    """
    return _one_forward_one_backward(num_ranks, num_microbatches, num_virtual_stages, is_split=False)


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> list[list[Action]]:
    """Interleaved 1F1B with split backwards: weight gradients wait until the pipeline drains (Qi et al. 2023, ZB-H1).

    The input's gradient goes on to the previous stage at once; the weight's (arXiv 2401.10241) fills what was bubble.
    What is in flight belongs to stages that are `num_virtual_stages` times smaller than 1f1b's.

    Returns:
        One list per rank; rank r holds stages r, r + num_ranks, ...

    Raises:
        PlanError: a number below 1 or no integer, or micro-batches that are no whole rounds.

    >>> from labkit import predict, schedule
    >>> print(schedule.format_actions(interleaved_zero_bubble(2, 2)))
    0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    >>> [schedule.num_in_flight(line) for line in interleaved_zero_bubble(4, 8)]
    [8, 8, 8, 8]
    >>> round(predict.timeline(interleaved_zero_bubble(4, 8), 1.0, 2.0).bubble_fraction, 4)
    0.0588
    """
    return _one_forward_one_backward(num_ranks, num_microbatches, num_virtual_stages, is_split=True)


def looped_bfs(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> list[list[Action]]:
    """All micro-batches through a rank's first stage, then all through its second: breadth first.

    Lamy-Poirier 2022, arXiv 2211.05953. Backwards go the other way, the newest micro-batch first. It holds as much as
    gpipe, but needs each stage's sharded weights in one stretch, and filling takes `num_virtual_stages` times less.

    Returns:
        One list per rank; rank r holds stages r, r + num_ranks, ...

    Raises:
        PlanError: a number below 1 or no integer.

    >>> from labkit import predict, schedule
    >>> print(schedule.format_actions(looped_bfs(2, 2)))
    0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
    1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    >>> [schedule.num_in_flight(line) for line in looped_bfs(4, 8)]
    [16, 16, 16, 16]
    >>> round(predict.timeline(looped_bfs(4, 8), 1.0, 2.0).bubble_fraction, 4)  # (p - 1) / (v m + p - 1)
    0.1579
    """
    num_ranks, num_microbatches, num_virtual_stages = _sizes(num_ranks, num_microbatches, num_virtual_stages)
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_virtual_stages, num_ranks)
        forwards = [Action(stage, "F", each) for stage in stages for each in range(num_microbatches)]
        ranks.append(forwards + [Action(action.stage, "B", action.microbatch) for action in reversed(forwards)])
    return ranks


def _one_forward_one_backward(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int, *, is_split: bool
) -> list[list[Action]]:
    num_ranks, num_microbatches, num_virtual_stages = _sizes(num_ranks, num_microbatches, num_virtual_stages)
    if num_microbatches % num_ranks:
        raise PlanError(
            f"num_microbatches={num_microbatches} is not divisible by num_ranks={num_ranks}: micro-batches go in "
            f"rounds of one for each rank. Use num_microbatches={-(-num_microbatches // num_ranks) * num_ranks}."
        )
    return [_rank(rank, num_ranks, num_microbatches, num_virtual_stages, is_split) for rank in range(num_ranks)]


def _rank(rank: int, num_ranks: int, num_microbatches: int, num_virtual_stages: int, is_split: bool) -> list[Action]:
    """What one rank does: forwards to fill, then one forward and one backward, then backwards.

    A rank waits 2 hops longer for its first backward than the next one, 1 when only the input's gradient travels. With
    split backwards, weight gradients lag `rank` behind: the later a rank, the longer it has nothing else at the end.
    """
    num_forwards = num_virtual_stages * num_microbatches
    hops = num_ranks - 1 - rank
    num_warmup = min((num_virtual_stages - 1) * num_ranks + hops * (1 if is_split else 2), num_forwards)
    forwards = _walk(rank, "F", range(num_virtual_stages), num_ranks, num_forwards)
    backwards = _walk(rank, "I" if is_split else "B", range(num_virtual_stages)[::-1], num_ranks, num_forwards)
    weights = [Action(action.stage, "W", action.microbatch) for action in backwards] if is_split else []
    actions = forwards[:num_warmup]
    num_weights = 0
    for index, backward in enumerate(backwards):
        actions += forwards[num_warmup + index : num_warmup + index + 1]
        actions.append(backward)
        if is_split and index >= rank:
            actions.append(weights[num_weights])
            num_weights += 1
    return actions + weights[num_weights:]


def _walk(rank: int, kind: str, order: range, num_ranks: int, num_actions: int) -> list[Action]:
    """A rank's stages in turn, `num_ranks` micro-batches each."""
    done: Counter[int] = Counter()
    actions = []
    for index in range(num_actions):
        stage = order[index // num_ranks % len(order)] * num_ranks + rank
        actions.append(Action(stage, kind, done[stage]))
        done[stage] += 1
    return actions


def _sizes(num_ranks: int, num_microbatches: int, num_virtual_stages: int) -> tuple[int, int, int]:
    return (
        whole("num_ranks", num_ranks),
        whole("num_microbatches", num_microbatches),
        whole("num_virtual_stages", num_virtual_stages),
    )
