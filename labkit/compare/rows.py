"""Quantities of two steps, each measured on both by the same rule."""

import statistics
from collections.abc import Iterable, Mapping
from typing import TypeVar

from labkit.compare.comparison import Row
from labkit.compare.step import Spans, Step, length

__all__ = ["rows"]

_Key = TypeVar("_Key", int, str)

BACKWARDS = ("B", "I", "W")


def rows(predicted: Step, measured: Step) -> list[Row]:
    """Return the rows of a comparison, the step time first."""
    both = (predicted, measured)
    bubbles = [step.trace.bubble_fraction if step.compute and step.trace.aligned else None for step in both]
    imbalances = [_imbalance(step.seconds_by_stage()) for step in both]
    found = [
        Row(what="step time", predicted=predicted.time_s, measured=measured.time_s),
        Row(what="bubble", unit="fraction", predicted=bubbles[0], measured=bubbles[1]),
    ]
    if imbalances != [None, None]:
        found.append(Row(what="imbalance", unit="ratio", predicted=imbalances[0], measured=imbalances[1]))
    for what, kinds in (("compute", ("F", *BACKWARDS)), ("forward", ("F",)), ("backward", BACKWARDS)):
        seconds = [_of_stages(step, kinds, each=what != "compute") for step in both]
        found += [
            Row(what=what, predicted=seconds[0].get(stage), measured=seconds[1].get(stage), stage=stage)
            for stage in _keys(seconds)
        ]
    waits = [_waiting(step) for step in both]
    if waits[0] is not None or waits[1] is not None:
        found.append(Row(what="waiting", predicted=waits[0], measured=waits[1], axis="pp"))
    for axis in _keys([step.collectives for step in both]):
        means = [_mean(step, step.collectives.get(axis, {})) for step in both]
        found.append(Row(what="collectives", predicted=means[0], measured=means[1], axis=axis))
    updates = [_mean(step, step.optimizer) for step in both]
    if updates != [None, None]:
        found.append(Row(what="optimizer", predicted=updates[0], measured=updates[1]))
    starts = [_first_starts(step) for step in both]
    return found + [
        Row(what="late start", predicted=starts[0].get(rank), measured=starts[1].get(rank), rank=rank)
        for rank in _keys(starts)
    ]


def _keys(maps: Iterable[Mapping[_Key, object]]) -> list[_Key]:
    return sorted({key for each in maps for key in each})


def _imbalance(seconds: Mapping[int, float]) -> float | None:
    if len(seconds) < 2 or not any(seconds.values()):
        return None
    return max(seconds.values()) / statistics.mean(seconds.values())


def _of_stages(step: Step, kinds: tuple[str, ...], *, each: bool) -> dict[int, float]:
    """Seconds of each stage in a step, or of each of its micro-batches."""
    seconds = step.seconds_by_stage(kinds)
    if not each:
        return seconds
    done: dict[int, set[tuple[int, int | None]]] = {stage: set() for stage in seconds}
    for rank, line in step.compute.items():
        for event in line:
            if event.stage in done and event.kind in kinds:
                done[event.stage].add((rank, event.microbatch))
    num_ranks = {stage: len({rank for rank, _ in pairs}) for stage, pairs in done.items()}
    return {stage: seconds[stage] * num_ranks[stage] / len(done[stage]) for stage in seconds}


def _mean(step: Step, by_rank: Mapping[int, Spans]) -> float | None:
    """Seconds of these spans, mean over all ranks of the step; None where no rank has any."""
    if not by_rank:
        return None
    return sum(length(spans) for spans in by_rank.values()) / len(step.trace.ranks)


def _waiting(step: Step) -> float | None:
    """Idle seconds before computations that need another stage's result, mean over ranks; None without a pipeline."""
    if len(step.stages) < 2 or not step.trace.aligned:
        return None
    last = step.stages[-1]
    idle_s = 0.0
    for line in step.compute.values():
        reached = step.start_s
        for event in line:
            is_fed = event.stage is not None and (
                (event.kind == "F" and event.stage > 0) or (event.kind in "BI" and event.stage < last)
            )
            idle_s += max(0.0, event.start_s - reached) if is_fed else 0.0
            reached = max(reached, event.end_s)
    return idle_s / len(step.compute)


def _first_starts(step: Step) -> dict[int, float]:
    if not step.trace.aligned:
        return {}
    return {rank: line[0].start_s - step.start_s for rank, line in step.compute.items()}
