"""Schedules of a pipeline that goes down the ranks and up again: rank r of p holds stages r and 2p - 1 - r.

The first rank holds the first and the last stage, so a micro-batch's backward begins where its forward did. The
middle two stages are on one rank and exchange nothing.
"""

from collections import Counter, deque

from labkit.errors import PlanError
from labkit.schedule.action import Action
from labkit.spec.checks import whole

__all__ = ["dualpipe_v", "zbv"]


def zbv(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Split backwards in a V: what was bubble is filled, with the memory of 1f1b (Qi et al. 2024, arXiv 2405.15362).

    Micro-batches in flight are those of 2 num_ranks stages, half as large as 1f1b's. The bubble is smallest when
    forward, input gradient and weight gradient take equally long.

    Returns:
        One list per rank; rank r holds stages r and 2 num_ranks - 1 - r.

    Raises:
        PlanError: a number below 1 or no integer.

    >>> from labkit import predict, schedule
    >>> print(schedule.format_actions(zbv(2, 2)))
    0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
    1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1
    >>> [schedule.num_in_flight(line) for line in zbv(4, 8)]
    [8, 8, 8, 8]
    >>> round(predict.timeline(zbv(4, 8), 1.0, 2.0).bubble_fraction, 4)
    0.0588
    """
    num_ranks, num_microbatches = whole("num_ranks", num_ranks), whole("num_microbatches", num_microbatches)
    return [
        [action for action in _zbv_rank(rank, num_ranks, num_microbatches) if action.microbatch < num_microbatches]
        for rank in range(num_ranks)
    ]


def _zbv_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """What one rank does with at least as many micro-batches as fill the V; those too many are dropped afterwards."""
    first, second = rank, 2 * num_ranks - 1 - rank
    num_filling = max(2 * num_ranks - 1, num_microbatches)
    line = _Line()
    for _ in range(2 * (num_ranks - rank) - 1):
        line.add(first, "F")
    for _ in range(rank):
        line.add(second, "F")
        line.add(first, "F")
    for _ in range(num_ranks - rank):
        line.add(second, "FIW")
    while line.count(second, "F") < line.count(first, "F") or line.count(first, "F") < num_filling:
        if line.count(first, "F") < num_filling:
            line.add(first, "F")
        line.add(first, "IW")
        line.add(second, "FIW")
    for _ in range(rank):
        line.add(first, "I")
        line.add(second, "I")
    for _ in range(num_ranks - rank):
        line.add(first, "IW")
    for stage in (second, first):
        while line.count(stage, "W") < line.count(stage, "I"):
            line.add(stage, "W")
    return line.actions


def dualpipe_v(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Forwards of one direction beside backwards of the other, in a V (DeepSeek-AI 2024, arXiv 2412.19437; its V form).

    In DeepSeek's form a forward and the backward after it share the rank's time and hide each other's communication;
    as a list of actions they follow one another. Backwards are split only where the pipeline drains.

    Returns:
        One list per rank; rank r holds stages r and 2 num_ranks - 1 - r.

    Raises:
        PlanError: a number below 1 or no integer, or fewer micro-batches than stages.

    >>> from labkit import predict, schedule
    >>> print(schedule.format_actions(dualpipe_v(2, 4)))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    >>> [schedule.num_in_flight(line) for line in dualpipe_v(4, 8)]
    [9, 9, 9, 9]
    >>> round(predict.timeline(dualpipe_v(4, 8), 1.0, 2.0).bubble_fraction, 4)
    0.0588
    """
    num_ranks, num_microbatches = whole("num_ranks", num_ranks), whole("num_microbatches", num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise PlanError(
            f"num_microbatches={num_microbatches} is fewer than 2 * num_ranks({num_ranks}) = {2 * num_ranks} stages: "
            f"both directions of the V must be full. Use num_microbatches={2 * num_ranks}."
        )
    return [_dualpipe_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def _dualpipe_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """What one rank does, in the eight stretches of DeepSeek's own code (github.com/deepseek-ai/DualPipe)."""
    first, second = rank, 2 * num_ranks - 1 - rank
    hops = num_ranks - 1 - rank
    line = _Line()
    for _ in range(2 * hops):
        line.add(first, "F")
    for _ in range(rank + 1):
        line.add(first, "F")
        line.add(second, "F")
    for _ in range(hops):
        line.add(second, "I")
        line.add_pending_weight()
        line.add(second, "F")
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        line.add(first, "F")
        line.add(second, "B")
        line.add(second, "F")
        line.add(first, "B")
    for _ in range(hops):
        line.add(second, "B")
        line.add(second, "F")
        line.add(first, "B")
    # The second half of these backwards is split: one backward earlier on every other rank.
    for index in range(2 * (rank + 1)):
        is_split = index > 2 * ((rank + 1) // 2) - rank % 2
        line.add(second if index % 2 == 0 else first, "I" if is_split else "B")
    for _ in range(hops):
        line.add_pending_weight()
        line.add(first, "I")
    for _ in range(rank + 1):
        line.add_pending_weight()
    return line.actions


class _Line:
    """A rank's actions as they are written down, each stage's micro-batches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._done: Counter[tuple[int, str]] = Counter()
        self._pending: deque[Action] = deque()

    def count(self, stage: int, kind: str) -> int:
        """How many actions of that kind there are."""
        return self._done[stage, kind]

    def add(self, stage: int, kinds: str) -> None:
        """Append the next action of each kind; an input gradient's weight gradient becomes pending."""
        for kind in kinds:
            # A whole backward is the next input gradient and the next weight gradient.
            place = self._done[stage, "I" if kind == "B" else kind]
            self.actions.append(Action(stage, kind, place))
            self._done.update((stage, part) for part in ("IW" if kind == "B" else kind))
            if kind == "I":
                self._pending.append(Action(stage, "W", place))

    def add_pending_weight(self) -> None:
        """Append the oldest weight gradient that is due, if there is one."""
        if self._pending:
            self.actions.append(self._pending.popleft())
