"""A step's computations as a graph that can be replayed: what if only some of its durations were another step's."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.compare.step import Step
from labkit.trace import Event

__all__ = ["Delays", "Graph", "delays", "graph", "replay"]


class Node(NamedTuple):
    """A computation.

    Attributes:
        event: it.
        before: index of what its rank computed before it; -1 at the beginning.
        source: index of the other rank's computation whose result it needs; -1 if it needs none.
    """

    event: Event
    before: int
    source: int


Graph = Sequence[Node]
"""Computations in an order in which each comes after what it needs."""

Key = tuple[int, int | None, str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """What each node takes, and what passes between what it needs and its start.

    `start = max(end of the one before + between, end of the source + message) + late`

    Attributes:
        duration: seconds of the computation.
        between: from the end of the rank's computation before it.
        message: from the end of the source's computation.
        late: only of a rank's first computation: what no message accounts for.
    """

    duration: list[float]
    between: list[float]
    message: list[float]
    late: list[float]


def graph(step: Step) -> Graph | None:
    """Return a step's computations with what each needs; None where they do not fit together."""
    if not step.compute or not step.trace.aligned:
        return None
    lines = {rank: [(_key(event), event) for event in line] for rank, line in step.compute.items()}
    keys = {key for line in lines.values() for key, _ in line}
    if len(keys) < sum(map(len, lines.values())):
        return None
    partners = _partners(step)
    done: dict[Key, int] = {}
    nodes: list[Node] = []
    left = dict.fromkeys(lines, 0)
    while left:
        before = len(nodes)
        for rank in list(left):
            line = lines[rank]
            while left[rank] < len(line):
                key, event = line[left[rank]]
                source = _source(key, partners, keys)
                if source is not None and source not in done:
                    break
                last = done[line[left[rank] - 1][0]] if left[rank] else -1
                done[key] = len(nodes)
                nodes.append(Node(event, last, -1 if source is None else done[source]))
                left[rank] += 1
            if left[rank] == len(line):
                del left[rank]
        if len(nodes) == before:
            return None
    return nodes


def _key(event: Event) -> Key:
    return event.rank, event.stage, event.kind, event.microbatch


def _partners(step: Step) -> dict[tuple[int, int], dict[int, int]]:
    """(rank, its stage) -> neighbouring stage -> the rank that holds it in the same pipeline.

    Ranks fill a mesh whose pipelines lie side by side, so the n-th rank of a stage talks to the n-th of the next.
    """
    holders: dict[int, set[int]] = {}
    for rank, line in step.compute.items():
        for event in line:
            if event.stage is not None:
                holders.setdefault(event.stage, set()).add(rank)
    ordered = {stage: sorted(ranks) for stage, ranks in holders.items()}
    found: dict[tuple[int, int], dict[int, int]] = {}
    for stage, ranks in ordered.items():
        for other in (stage - 1, stage + 1):
            if len(ordered.get(other, ())) == len(ranks):
                for rank, partner in zip(ranks, ordered[other], strict=True):
                    found.setdefault((rank, stage), {})[other] = partner
    return found


def _source(key: Key, partners: Mapping[tuple[int, int], Mapping[int, int]], keys: set[Key]) -> Key | None:
    """What another rank must have computed before."""
    rank, stage, kind, microbatch = key
    if stage is None or kind == "W":
        return None
    other = stage - 1 if kind == "F" else stage + 1
    partner = partners.get((rank, stage), {}).get(other)
    if partner is None or partner == rank:
        return None
    for wanted in ("F",) if kind == "F" else ("B", "I"):
        if (source := (partner, other, wanted, microbatch)) in keys:
            return source
    return None


def delays(nodes: Graph, starts_s: Sequence[float], durations_s: Sequence[float]) -> Delays:
    """Read from starts and durations what each node waited for; `replay` of it gives these starts again.

    Only the later of two needs shows how long it took: for the other, the median of those that show it.
    """
    ends_s = [start_s + duration_s for start_s, duration_s in zip(starts_s, durations_s, strict=True)]
    gaps = [
        (
            start_s - (ends_s[node.before] if node.before >= 0 else 0.0),
            start_s - ends_s[node.source] if node.source >= 0 else None,
        )
        for node, start_s in zip(nodes, starts_s, strict=True)
    ]
    followers = [pair for node, pair in zip(nodes, gaps, strict=True) if node.before >= 0]
    messages = [sent for own, sent in followers if sent is not None and sent <= own]
    betweens = [own for own, sent in followers if sent is None or own < sent]
    usual_message = statistics.median(messages) if messages else 0.0
    usual_between = statistics.median(betweens) if betweens else 0.0
    found = Delays(duration=list(durations_s), between=[], message=[], late=[])
    for node, (own, sent) in zip(nodes, gaps, strict=True):
        late = between = message = 0.0
        if node.before < 0:
            message = 0.0 if sent is None else min(usual_message, sent)
            late = own if sent is None else min(own, sent - message)
        elif sent is not None and sent <= own:
            between, message = min(usual_between, own), sent
        else:
            between, message = own, min(usual_message, sent) if sent is not None else 0.0
        found.between.append(between)
        found.message.append(message)
        found.late.append(late)
    return found


def replay(nodes: Graph, given: Delays) -> float:
    """Return when the last computation ends."""
    ends_s: list[float] = []
    last_s = 0.0
    rows = zip(nodes, given.duration, given.between, given.message, given.late, strict=True)
    for (_, before, source), duration, between, message, late in rows:
        start_s = ends_s[before] + between if before >= 0 else 0.0
        if source >= 0 and ends_s[source] + message > start_s:
            start_s = ends_s[source] + message
        ends_s.append(start_s + late + duration)
        last_s = max(last_s, ends_s[-1])
    return last_s
