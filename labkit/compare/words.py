"""Gaps in words: what each is, and one sentence about the largest, with a reason where the plans give one."""

import statistics
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

from labkit.compare.comparison import seconds_text
from labkit.compare.gaps import Gap, Place, speeds
from labkit.compare.step import Step, length
from labkit.errors import ranks_text
from labkit.plan import Plan
from labkit.spec import Layout

__all__ = ["Found", "sentence", "text"]

SMALL = 0.02
"""A difference of this share of the step is none: runs of one layout differ by as much."""

SLOW = 1.1
"""How many times as long computation takes before something is said to be the matter with all of it."""

LARGE = 0.05
"""Gaps that cancel are named from this share of the step on."""


class Found(NamedTuple):
    """Both steps and what makes them differ.

    Attributes:
        predicted: the first step.
        measured: the second.
        gaps: largest first.
        num_cores: of the machine that ran the second, if known.
        is_same_work: whether both run the same computations in the same order, and gaps were found by replaying.
    """

    predicted: Step
    measured: Step
    gaps: Sequence[Gap]
    num_cores: int | None
    is_same_work: bool

    @property
    def plan(self) -> Plan | None:
        """What the second step ran."""
        return self.measured.trace.plan or self.predicted.trace.plan

    @property
    def other(self) -> str:
        """What the second step is compared with, after "than"."""
        return "predicted" if self.is_run else "in the first"

    @property
    def is_run(self) -> bool:
        """Whether a prediction is compared with a run."""
        return (self.predicted.trace.origin, self.measured.trace.origin) == ("predicted", "measured")


def text(found: Found, gap: Gap) -> str:
    """Write a gap in a few words.

    It says how the quantity itself differs; the gap's seconds say what that does to the step.
    """
    place, more = gap.place, "more" if gap.seconds > 0 else "less"
    if place.what == "compute":
        return f"{_who(place)} {_takes(found, place)}"
    if place.what == "late start":
        return f"{'all ranks begin' if place.rank is None else f'rank {place.rank} begins'} {_later(found, gap)}"
    if place.what in ("collectives", "optimizer"):
        name = "the optimizer" if place.what == "optimizer" else f"collectives over {place.axis}"
        is_one = place.what == "optimizer"
        if _is_new(found, place):
            return f"{name} {'is' if is_one else 'are'} only in the {'measured' if found.is_run else 'second'} step"
        return f"{name} {'takes' if is_one else 'take'} {more} time"
    each = ""
    if gap.spans and gap.seconds > 0:
        each = f"{seconds_text(statistics.median(span.end_s - span.start_s for span in gap.spans))} "
    return {
        "messages": f"messages between stages take {each}{more}{' each' if each else ' time'}",
        "between actions": f"{each or more + ' time '}{more + ' ' if each else ''}passes between the actions of a rank",
        "waiting": f"ranks wait {more}",
        "other": f"{more} time passes outside of what was recorded",
    }[place.what]


def _is_new(found: Found, place: Place) -> bool:
    """Whether the first trace has nothing of the kind."""
    step = found.predicted
    return not (step.optimizer if place.what == "optimizer" else step.collectives.get(place.axis or ""))


def _who(place: Place) -> str:
    if place.rank is not None:
        return f"rank {place.rank}"
    return "computation" if place.stage is None else f"stage {place.stage}"


def _takes(found: Found, place: Place) -> str:
    """`is 31 % slower`, as its computations say."""
    ratio = _ratio(found, place)
    if ratio >= 2:
        return f"takes {ratio:.3g} times as long"
    if ratio < 1:
        return f"takes {_percent(1 - ratio)} less time"
    more = _percent(ratio - 1)
    return f"is {more} slower" if found.is_same_work else f"takes {more} longer"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _ratio(found: Found, place: Place) -> float:
    """How many times as long the stage, the rank or everything computes."""
    ratios = speeds(found.predicted, found.measured)
    if place.stage is None and place.rank is None and found.is_same_work:
        return min(ratios.values(), key=lambda ratio: abs(ratio - 1), default=1.0)
    if place.stage is None and place.rank is None:
        seconds = [sum(length(step.busy(rank)) for rank in step.compute) for step in (found.predicted, found.measured)]
        num_ranks = [len(step.trace.ranks) for step in (found.predicted, found.measured)]
        return (seconds[1] / num_ranks[1]) / (seconds[0] / num_ranks[0]) if seconds[0] else 1.0
    alike = [ratio for (rank, stage), ratio in ratios.items() if place.stage == stage and place.rank in (None, rank)]
    return statistics.mean(alike) if alike else 1.0


def _later(found: Found, gap: Gap) -> str:
    lines = [step.compute for step in (found.predicted, found.measured)]
    ranks = list(lines[1]) if gap.place.rank is None else [gap.place.rank]
    one_s, two_s = found.predicted.start_s, found.measured.start_s
    later_s = [(lines[1][rank][0].start_s - two_s) - (lines[0][rank][0].start_s - one_s) for rank in ranks]
    least_s = min(later_s, key=abs)
    return f"{seconds_text(abs(least_s))} {'later' if least_s > 0 else 'earlier'}"


def sentence(found: Found) -> str:
    """Write what to make of the comparison."""
    one_s, two_s = found.predicted.time_s, found.measured.time_s
    difference_s = two_s - one_s
    times = f"{seconds_text(two_s)} against {seconds_text(one_s)}"
    if abs(difference_s) <= SMALL * one_s:
        return _alike(found, times, LARGE * max(one_s, two_s))
    towards = [gap for gap in found.gaps if gap.seconds * difference_s > 0]
    if not towards:
        return f"The step takes {times}."
    gap = towards[0]
    fact, reason = text(found, gap), _reason(found, gap)
    if not fact.endswith(" step"):
        fact += f" as {found.other}" if fact.endswith(" times as long") else f" than {found.other}"
    share = 100 * gap.seconds / difference_s
    part = "all" if 99.5 <= share < 100.5 else f"{share:.0f} %" if share < 100.5 else "more than all"
    effect = f"that is {part} of the {seconds_text(abs(difference_s))} by which the step is "
    effect += "longer" if difference_s > 0 else "shorter"
    said = f"{fact}: {reason}; {effect}" if reason else f"{fact}, and {effect}"
    return f"{said[0].upper()}{said[1:]}."


def _alike(found: Found, times: str, large_s: float) -> str:
    large = [gap for gap in found.gaps if abs(gap.seconds) > large_s][:2]
    word = "as predicted" if found.other == "predicted" else "as in the first"
    if len(large) < 2:
        return f"The step takes as long {word} ({times})."
    said = " and ".join(f"{text(found, gap)} ({seconds_text(gap.seconds, sign=True)})" for gap in large)
    return f"The step takes as long {word} ({times}), but only because gaps cancel: {said}."


def _reason(found: Found, gap: Gap) -> str:
    """Why, and what to do, as far as plan and numbers tell; else nothing."""
    changed = _changes(found.predicted.trace.plan, found.measured.trace.plan)
    if changed:
        return changed
    if gap.place.what == "compute":
        return _why_compute(found, gap)
    if gap.place.what == "collectives":
        return _why_collectives(found, gap.place.axis or "")
    if gap.seconds < 0:
        return ""
    return {
        "late start": f"see what {'ranks do' if gap.place.rank is None else 'it does'} before the first action",
        "messages": "more micro-batches give ranks work to do meanwhile",
        "between actions": "starting work costs time here, which larger micro-batches need less often",
        "optimizer": "sharding its states over dp (zero1) shortens it" if _dp(found) > 1 else "",
        "waiting": _why_waiting(found),
    }.get(gap.place.what, "")


def _dp(found: Found) -> int:
    plan = found.plan
    return plan.layout.dp if plan is not None and plan.layout.zero_stage == 0 else 1


def _changes(one: Plan | None, two: Plan | None) -> str:
    """In what two plans differ."""
    if one is None or two is None or one == two:
        return ""
    if one.model != two.model:
        return "the models differ"
    names = [field.name for field in fields(Layout)]
    pairs = [(name, getattr(one.layout, name), getattr(two.layout, name)) for name in names]
    listed = [f"{name}={after} instead of {before}" for name, before, after in pairs if before != after]
    return f"it has {', '.join(listed)}" if listed else "the schedules differ"


def _why_compute(found: Found, gap: Gap) -> str:
    place, plan = gap.place, found.plan
    is_slower = _ratio(found, place) > 1
    if found.measured.trace.pace is not None and (why := _why_paced(found, place)):
        return why
    if place.rank is not None:
        return "other ranks with the same work are not, so see what else runs beside it" if is_slower else ""
    if plan is None or place.stage is None or place.stage >= plan.num_stages or plan.num_stages == 1:
        return _why_all(found) if is_slower else ""
    if why := _why_recompute(found, place.stage):
        return why
    return _why_stage(found, plan, place.stage, is_slower)


def _why_all(found: Found) -> str:
    if _ratio(found, Place("compute")) < SLOW:
        return ""
    num_ranks, cores, trace = len(found.measured.trace.ranks), found.num_cores, found.measured.trace
    if trace.origin == "measured" and cores is not None and num_ranks > cores:
        return (
            f"{num_ranks} ranks share {cores} core{'s' * (cores != 1)}, so predict with the speed that is left to each"
        )
    if not found.is_same_work and (stage := _slowest(found)) is not None:
        return f"stage {stage} alone {_takes(found, Place('compute', stage=stage))}"
    return "predict with the speed that these ranks have" if found.is_run else ""


def _why_waiting(found: Found) -> str:
    if (stage := _slowest(found)) is not None:
        return f"for stage {stage}, which {_takes(found, Place('compute', stage=stage))}"
    return "more micro-batches shrink the bubble" if found.plan is not None and found.plan.layout.pp > 1 else ""


def _slowest(found: Found) -> int | None:
    """The one stage that is slow, where ranks cannot be replayed; None where all are alike."""
    ratios = {stage: _ratio(found, Place("compute", stage=stage)) for stage in found.measured.stages}
    ordered = sorted(ratios, key=lambda stage: -ratios[stage])
    return ordered[0] if len(ordered) > 1 and ratios[ordered[0]] > SLOW * ratios[ordered[1]] else None


def _why_stage(found: Found, plan: Plan, stage: int, is_slower: bool) -> str:
    """What a stage has that the others have not."""
    layers = [len(plan.layers(each)) for each in range(plan.num_stages)]
    if is_slower and stage == plan.num_stages - 1:
        return f"it holds the output layer{_counted(found, stage)}"
    if is_slower and layers[stage] > min(layers):
        return f"it has {_layers(layers[stage])} and others {min(layers)}{_counted(found, stage)}"
    if is_slower and stage == 0:
        return f"it holds the embedding{_counted(found, stage)}"
    if not is_slower and layers[stage] < max(layers):
        return f"it has {_layers(layers[stage])} and others {max(layers)}{_counted(found, stage)}"
    if is_slower and found.measured.trace.origin == "measured":
        ranks = [rank for rank, line in found.measured.compute.items() if any(one.stage == stage for one in line)]
        return f"it has as many layers as the others, so see what else runs beside {ranks_text(ranks)}"
    return ""


def _layers(number: int) -> str:
    return f"{number} layer{'s' * (number != 1)}"


def _counted(found: Found, stage: int) -> str:
    """Whether the first trace has the stage longer, or shorter, than the others already."""
    seconds = found.predicted.seconds_by_stage()
    others = [value for each, value in seconds.items() if each != stage]
    if not others or abs(seconds[stage] - statistics.median(others)) > SMALL * statistics.median(others):
        return ", which is counted, but not as it is here" if found.other == "predicted" else ""
    return ", and it was predicted like the others" if found.other == "predicted" else ""


def _why_recompute(found: Found, stage: int) -> str:
    """A backward that is longer by a forward, which the other trace does not have."""
    plan = found.plan
    if plan is None or plan.layout.recompute == "none" or found.other != "predicted":
        return ""
    forward, backward = (
        [step.seconds_by_stage(kinds).get(stage, 0.0) for step in (found.predicted, found.measured)]
        for kinds in (("F",), ("B", "I", "W"))
    )
    more_s = backward[1] - backward[0]
    if forward[1] > 0 and abs(forward[1] - forward[0]) < LARGE * forward[0] and 0.5 < more_s / forward[1] < 1.5:
        return f"its backward is longer by a forward, which recompute={plan.layout.recompute} runs again"
    return ""


def _why_paced(found: Found, place: Place) -> str:
    """What a declared pace has to do with it."""
    pace, plan = found.measured.trace.pace, found.measured.trace.plan
    stages = [place.stage] if place.stage is not None else found.measured.stages
    if pace is None or plan is None or max(stages, default=0) >= plan.num_stages:
        return ""
    if any(isinstance(one, tuple) and len(one) != plan.num_stages for one in (pace.forward_s, pace.backward_s)):
        return ""
    declared_s = plan.layout.num_microbatches * sum(pace.seconds(kind, stage) for kind in "FB" for stage in stages)
    seconds = found.measured.seconds_by_stage()
    took_s = sum(seconds.get(stage, 0.0) for stage in stages)
    if abs(took_s - declared_s) <= LARGE * declared_s:
        return "its pace was declared so, and a prediction with the same durations shows it"
    if took_s > declared_s:
        more = f"{100 * (took_s / declared_s - 1):.0f} %"
        return f"its work needs {more} more than the pace declares, so declare a longer one"
    return ""


def _why_collectives(found: Found, axis: str) -> str:
    """Who comes last: whoever is in the collectives the shortest does not wait for the others."""
    by_rank = {rank: length(spans) for rank, spans in found.measured.collectives.get(axis, {}).items()}
    if len(by_rank) > 1 and (longest := max(by_rank.values())) > 0:
        last = min(by_rank, key=lambda rank: by_rank[rank])
        if by_rank[last] < longest / 2:
            return f"the others wait there for rank {last}, which comes last"
    return ""
