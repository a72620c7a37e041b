"""Where the difference of two steps comes from: each kind of delay of the second put into the first, one by one."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.compare.comparison import Span
from labkit.compare.replay import Delays, Graph, delays, graph, replay
from labkit.compare.step import Step, length, within
from labkit.trace import Event

__all__ = ["Gap", "Place", "gaps", "speeds"]

_ALIKE = 0.005
_NOTHING_S = 1e-12
_MOST_PLACES = 48


class Place(NamedTuple):
    """What differs, and where: of all stages and ranks where neither is named."""

    what: str
    stage: int | None = None
    rank: int | None = None
    axis: str | None = None


class Gap(NamedTuple):
    """How much longer a step is for it, and where in the second step that is seen."""

    place: Place
    seconds: float
    spans: tuple[Span, ...] = ()


Changes = dict[Place, list[tuple[str, int, float]]]
"""place -> (field of `Delays`, node, seconds more)."""


def gaps(predicted: Step, measured: Step) -> tuple[list[Gap], bool]:
    """Return gaps that add up to the difference of the step times, and whether they were found by replaying.

    Where both steps run the same computations in the same order, the first is replayed with each kind of delay of the
    second: those that change most are put in first, and each counts for what it adds to those before it. What
    follows the last computation is compared piece by piece. Other steps are compared by what their ranks do on average.
    """
    nodes = graph(predicted)
    has_replay = nodes is not None and measured.trace.aligned and _order(predicted) == _order(measured)
    if nodes is None or not has_replay:
        found = _on_average(predicted, measured)
    else:
        found = _replayed(predicted, measured, nodes) + _tails(predicted, measured)
    rest_s = measured.time_s - predicted.time_s - sum(gap.seconds for gap in found)
    least_s = 1e-9 * max(measured.time_s, predicted.time_s)
    found = [*found, Gap(Place("other"), rest_s)] if abs(rest_s) > least_s else found
    added: dict[Place, Gap] = {}
    for gap in found:
        known = added.get(gap.place, Gap(gap.place, 0.0))
        added[gap.place] = Gap(gap.place, known.seconds + gap.seconds, known.spans + gap.spans)
    kept = [gap for gap in added.values() if abs(gap.seconds) > least_s]
    return sorted(kept, key=lambda gap: -abs(gap.seconds)), has_replay


def speeds(predicted: Step, measured: Step) -> dict[tuple[int, int | None], float]:
    """Return (rank, stage) -> how many times as long it computes, without collectives that both wait for within.

    Those that the first step does not have are left out.
    """
    axes = _nested(predicted) & _nested(measured)
    totals: list[dict[tuple[int, int | None], float]] = []
    for step in (predicted, measured):
        seconds: dict[tuple[int, int | None], float] = defaultdict(float)
        for rank, line in step.compute.items():
            for event in line:
                seconds[rank, event.stage] += event.duration_s - sum(_inside(step, axis, event) for axis in axes)
        totals.append(seconds)
    return {key: totals[1][key] / value for key, value in totals[0].items() if value > 0 and key in totals[1]}


def _order(step: Step) -> dict[int, list[tuple[object, ...]]]:
    return {rank: [(one.kind, one.stage, one.microbatch) for one in line] for rank, line in step.compute.items()}


def _replayed(predicted: Step, measured: Step, nodes: Graph) -> list[Gap]:
    """Gaps up to the end of the last computation."""
    lines = {rank: iter(line) for rank, line in measured.compute.items()}
    others = [next(lines[node.event.rank]) for node in nodes]  # within a rank, nodes keep its order
    first = delays(
        nodes, [node.event.start_s - predicted.start_s for node in nodes], [node.event.duration_s for node in nodes]
    )
    second = delays(
        nodes, [other.start_s - measured.start_s for other in others], [other.duration_s for other in others]
    )
    changes = _compute_changes(predicted, measured, nodes, others)
    for field, what in (("between", "between actions"), ("message", "messages")):
        for index, (one, two) in enumerate(zip(getattr(first, field), getattr(second, field), strict=True)):
            if abs(two - one) > _NOTHING_S:
                changes[Place(what)].append((field, index, two - one))
    _add_late(changes, nodes, [two - one for one, two in zip(first.late, second.late, strict=True)])
    changes, base_s = _fewer(changes), replay(nodes, first)
    alone = {place: replay(nodes, _with(first, listed)) - base_s for place, listed in changes.items()}
    found, now, now_s = [], first, base_s
    for place in sorted(alone, key=lambda one: -abs(alone[one])):
        now = _with(now, changes[place])
        then_s = replay(nodes, now)
        found.append(Gap(place, then_s - now_s, _spans(changes[place], others)))
        now_s = then_s
    return found


def _fewer(changes: Changes) -> Changes:
    """Of very many places, the ranks that differ least are counted with their stage: every place is replayed twice."""
    sizes = {place: sum(abs(seconds) for _, _, seconds in listed) for place, listed in changes.items()}
    kept = set(sorted(sizes, key=lambda place: -sizes[place])[:_MOST_PLACES])
    found: Changes = defaultdict(list)
    for place, listed in changes.items():
        found[place if place in kept else place._replace(rank=None)] += listed
    return found


def _add_late(changes: Changes, nodes: Graph, more_s: Sequence[float]) -> None:
    """How much later ranks begin: what all share that wait for nobody, then what each has alone."""
    firsts = [index for index, node in enumerate(nodes) if node.before < 0 and node.source < 0]
    least, most = min(more_s[index] for index in firsts), max(more_s[index] for index in firsts)
    shared = 0.0 if len(firsts) < 2 else least if least > 0 else most if most < 0 else 0.0
    for index, more in enumerate(more_s):
        own = more - shared if index in firsts else more
        if shared and index in firsts:
            changes[Place("late start")].append(("late", index, shared))
        if abs(own) > _NOTHING_S:
            changes[Place("late start", rank=nodes[index].event.rank)].append(("late", index, own))


def _with(given: Delays, listed: Sequence[tuple[str, int, float]]) -> Delays:
    fields = {name: list(getattr(given, name)) for name in ("duration", "between", "message", "late")}
    for name, index, more in listed:
        fields[name][index] += more
    return Delays(**fields)


def _spans(listed: Sequence[tuple[str, int, float]], others: Sequence[Event]) -> tuple[Span, ...]:
    """Where in the second step its delays are longer: at the end of a computation, or before it."""
    found = []
    for name, index, more in listed:
        event = others[index]
        if more <= 0:
            continue
        if name == "duration":
            found.append(Span(event.rank, event.end_s - min(more, event.duration_s), event.end_s))
        else:
            found.append(Span(event.rank, event.start_s - more, event.start_s))
    return tuple(found)


def _compute_changes(predicted: Step, measured: Step, nodes: Graph, others: Sequence[Event]) -> Changes:
    """Computation in tiers: what all stages share, what the ranks of a stage share, what a rank has alone.

    Collectives that computations wait for within count apart, over axes of which both steps have such.
    """
    changes: Changes = defaultdict(list)
    ratios = speeds(predicted, measured)
    shared = _shared(list(ratios.values()))
    axes = sorted(_nested(predicted) & _nested(measured))
    by_stage: dict[int | None, list[float]] = defaultdict(list)
    for (_, stage), ratio in ratios.items():
        by_stage[stage].append(ratio)
    for index, (node, other) in enumerate(zip(nodes, others, strict=True)):
        event = node.event
        plain, more = event.duration_s, other.duration_s - event.duration_s
        for axis in axes:
            before, after = _inside(predicted, axis, event), _inside(measured, axis, other)
            plain, more = plain - before, more - (after - before)
            changes[Place("collectives", axis=axis)].append(("duration", index, after - before))
        of_stage = by_stage[event.stage]
        tiers = [(Place("compute"), plain * (shared - 1))]
        if len(by_stage) > 1 and len(of_stage) > 1:
            tiers.append((Place("compute", stage=event.stage), plain * (_shared(of_stage) - shared)))
        rank = event.rank if len(of_stage) > 1 else None
        tiers.append((Place("compute", stage=event.stage, rank=rank), more - sum(seconds for _, seconds in tiers)))
        for place, seconds in tiers:
            if abs(seconds) > _NOTHING_S:
                changes[place].append(("duration", index, seconds))
    return changes


def _shared(ratios: Sequence[float]) -> float:
    """How much slower, or faster, all of them are at least."""
    if not ratios:
        return 1.0
    if max(ratios) - min(ratios) <= _ALIKE * max(ratios):
        return sum(ratios) / len(ratios)
    return min(ratios) if min(ratios) > 1 else max(ratios) if max(ratios) < 1 else 1.0


def _nested(step: Step) -> set[str]:
    """Axes whose collectives lie within computations, all of them or but for a few at the end of the step."""
    found = set()
    for axis, by_rank in step.collectives.items():
        inside = 0
        for rank, spans in by_rank.items():
            busy = step.busy(rank)
            inside += sum(within(busy, start, end) >= (1 - _ALIKE) * (end - start) for start, end in spans)
        if 2 * inside > sum(map(len, by_rank.values())):
            found.add(axis)
    return found


def _inside(step: Step, axis: str, event: Event) -> float:
    """Seconds of a computation in collectives of an axis."""
    return within(step.collectives[axis].get(event.rank, ()), event.start_s, event.end_s)


def _tails(predicted: Step, measured: Step) -> list[Gap]:
    """Gaps after the last computation of all ranks, on the rank that is done last."""
    one, two = (_tail(step) for step in (predicted, measured))
    found = []
    for place in dict.fromkeys([*one, *two]):
        more = two.get(place, 0.0) - one.get(place, 0.0)
        found.append(Gap(place, more, _tail_spans(measured, place, more)))
    return found


def _tail(step: Step) -> Mapping[Place, float]:
    after_s = max(line[-1].end_s for line in step.compute.values())
    pieces = [(Place("collectives", axis=axis), by_rank) for axis, by_rank in sorted(step.collectives.items())]
    pieces.append((Place("optimizer"), step.optimizer))
    ends_s = {rank: spans[-1][1] for _, by_rank in pieces for rank, spans in sorted(by_rank.items()) if spans}
    for _, by_rank in pieces:
        for rank, spans in by_rank.items():
            ends_s[rank] = max(ends_s[rank], spans[-1][1])
    if not ends_s:
        return {}
    last = max(ends_s, key=lambda rank: (ends_s[rank], -rank))
    return {place: within(by_rank.get(last, ()), after_s, step.end_s) for place, by_rank in pieces}


def _tail_spans(step: Step, place: Place, more: float) -> tuple[Span, ...]:
    """The end of each rank's longest collective, or of its optimizer, after the last computation."""
    by_rank = step.optimizer if place.what == "optimizer" else step.collectives.get(place.axis or "", {})
    after_s = max(line[-1].end_s for line in step.compute.values())
    left = {rank: [span for span in spans if span[1] > after_s] for rank, spans in by_rank.items()}
    if more <= 0:
        return ()
    longest = {rank: max(spans, key=lambda span: span[1] - span[0]) for rank, spans in left.items() if spans}
    return tuple(Span(rank, max(start, end - more), end) for rank, (start, end) in longest.items())


def _on_average(predicted: Step, measured: Step) -> list[Gap]:
    one, two = (_means(step) for step in (predicted, measured))
    return [Gap(place, two.get(place, 0.0) - one.get(place, 0.0)) for place in dict.fromkeys([*one, *two])]


def _means(step: Step) -> Mapping[Place, float]:
    """What the ranks of a step do, mean over ranks: computation, collectives and optimizer outside it, waiting."""
    ranks = step.trace.ranks
    found: dict[Place, float] = defaultdict(float)
    for rank in ranks:
        busy = step.busy(rank)
        found[Place("compute")] += length(busy)
        pieces = [(Place("collectives", axis=axis), by_rank) for axis, by_rank in sorted(step.collectives.items())]
        for place, by_rank in [*pieces, (Place("optimizer"), step.optimizer)]:
            for start, end in by_rank.get(rank, ()):
                found[place] += end - start - within(busy, start, end)
    means = {place: seconds / len(ranks) for place, seconds in found.items()}
    return means | {Place("waiting"): step.time_s - sum(means.values())}
