"""A rank's memory at every moment at which it can be highest."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from labkit.predict.in_flight import Step
from labkit.predict.stage_memory import Costs

__all__ = ["SPLIT", "Bytes", "Held", "highest"]

SPLIT = "between I and W"
"""The kind of what a micro-batch keeps besides its activations between the two halves of its backward."""


class Bytes(NamedTuple):
    """What comes and goes in a step, beside weights and optimizer states."""

    gradients: int
    activations: int
    buffers: int
    temporary: int


class Held(NamedTuple):
    """What a rank holds at most.

    Attributes:
        most: each category's own highest.
        at_peak: each when their sum is highest.
        peak_at: the action then.
        kinds: kind -> bytes of activations when these are highest.
        buffers: kind -> bytes, each its own highest.
    """

    most: Bytes
    at_peak: Bytes
    peak_at: str
    kinds: dict[str, int]
    buffers: dict[str, int]


@dataclass(slots=True)
class _Found:
    """What a walk through a rank's actions found.

    Attributes:
        best: kind of backward, whether its stage has gradients, and what the stage costs -> the stage, the micro-batch,
            and the activations and gradients that are there when it begins, where these are most.
        most: the most activations.
        whole: stage -> micro-batches then.
        halves: stage -> those of them between the halves of their backward.
    """

    best: dict[tuple[str, bool, int], tuple[int, int, int, int]] = field(default_factory=dict)
    most: int = -1
    whole: dict[int, int] = field(default_factory=dict)
    halves: dict[int, int] = field(default_factory=dict)


def highest(line: Iterable[Step], costs: Mapping[int, Costs], *, always: int, update: int, lasts: bool) -> Held:
    """Go through a rank's actions and find what it holds at most.

    Args:
        line: the actions.
        costs: of each of its stages.
        always: bytes of buffers that are always there.
        update: bytes of buffers at the update.
        lasts: whether gradients keep their memory from step to step.
    """
    found = _walk(line, costs, lasts=lasts)
    at_update = Bytes(sum(one.gradients for one in costs.values()), 0, always + update, 0)
    most, at_peak, peak_at = at_update._replace(activations=found.most), at_update, "update"
    peak = sum(at_peak)
    for (kind, is_there, _), (stage, microbatch, held, done) in found.best.items():
        for one in _within(kind, costs[stage], is_there, held, done):
            now = Bytes(one.gradients, one.activations, one.buffers + always, one.temporary)
            most = Bytes(*map(max, most, now))
            if sum(now) > peak:
                peak, at_peak, peak_at = sum(now), now, f"{stage}{kind}{microbatch}"
    buffers = {
        "gathered weights": max(one.most_gathered for one in costs.values()),
        "packed gradients": max(one.reduced for one in costs.values()),
        "update": update,
    }
    return Held(most, at_peak, peak_at, _by_kind(found, costs), buffers)


def _walk(line: Iterable[Step], costs: Mapping[int, Costs], *, lasts: bool) -> _Found:
    """Keep, of all moments that differ in nothing but amounts, the fullest."""
    found = _Found()
    whole, halves = dict.fromkeys(costs, 0), dict.fromkeys(costs, 0)
    held, done = 0, sum(one.gradients for one in costs.values()) if lasts else 0
    there = set(costs) if lasts else set[int]()
    for stage, kind, microbatch in line:
        one = costs[stage]
        if kind == "F":
            whole[stage] += 1
            held += one.kept
            continue
        key = (kind, stage in there, id(one))  # stages that are alike share theirs
        known = found.best.get(key)
        if known is None or held + done > known[2] + known[3]:
            found.best[key] = (stage, microbatch, held, done)
        if held > found.most:
            found.most, found.whole, found.halves = held, dict(whole), dict(halves)
        if kind == "I":
            halves[stage] += 1
            held += one.split
            continue
        whole[stage] -= 1
        held -= one.kept
        if kind == "W":
            halves[stage] -= 1
            held -= one.split
        if stage not in there:
            there.add(stage)
            done += one.gradients
    return found


def _within(kind: str, one: Costs, is_there: bool, held: int, done: int) -> Iterator[Bytes]:
    """The moments of one backward: the loss, its first layer, its last, its end.

    Args:
        kind: "B", or "I" and "W".
        one: what its stage costs.
        is_there: whether the stage has gradients already.
        held: activations when it begins.
        done: gradients when it begins.
    """
    own = 0 if is_there else one.gradients
    if kind == "W" and not one.is_first:
        yield Bytes(done + own, held, 0, one.weights)
        return
    if kind == "I" and one.is_first:  # it does nothing: W does all
        yield Bytes(done, held, 0, 0)
        return
    pending = one.pending if is_there else 0
    yield Bytes(done, held, one.replicated + one.bucket + pending, one.logits)
    if kind == "I":
        yield Bytes(done, held, one.in_layers[0].gathered, one.layers)
        return
    if one.unpacked and not is_there:
        yield Bytes(done, held, one.unpacked, 0)
    for index, layer in enumerate(one.in_layers):
        temporary = one.layers + (0 if is_there and one.adds_up else layer.fresh)
        buffers = layer.gathered + layer.packed + (0 if index else pending)
        yield Bytes(done + (0 if is_there else layer.grown), held - layer.freed, buffers, temporary)
    yield Bytes(done + own, held - one.kept, one.gathered + one.reduced, one.end if is_there else 0)


def _by_kind(found: _Found, costs: Mapping[int, Costs]) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for stage, num_held in found.whole.items():
        for kind, size in costs[stage].kinds.items():
            kinds[kind] += num_held * size
        kinds[SPLIT] += found.halves[stage] * costs[stage].split
    return {kind: size for kind, size in kinds.items() if size}
