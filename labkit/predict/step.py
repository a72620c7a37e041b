"""How long a step of a plan takes on given hardware: what each action costs, and the schedule executed with it."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.predict.collectives import collective_time, reach
from labkit.predict.execution import Totals, execute, totals
from labkit.predict.software import Software
from labkit.predict.stages import Tail, send_seconds, stage_seconds, stage_sums, tails
from labkit.predict.timeline import action_events
from labkit.schedule import Action
from labkit.spec import Hardware
from labkit.spec.checks import shown
from labkit.trace import Event, LazyTrace, StepTotals, Trace

__all__ = ["step"]


def step(plan: Plan, hardware: Hardware, *, software: Software | None = None) -> Trace:
    """Predict one step: totals at once, events when they are asked for.

    What an action takes is the work of its layers (`predict.costs`): products at the reached share of the peak, then
    memory traffic, kernels and sums over tp, one after the other. The schedule is executed with these durations, event
    by event; a long one for a few rounds, which then repeat. What overlaps:

    - a message to another stage travels while both sides compute; whoever needs it waits for it;
    - of sums over tp, the share `software.tp_hidden` runs behind products;
    - of gradients' collectives over dp, the share `software.dp_hidden`, at most the last micro-batch's backward, and of
      ZeRO-3's gathering and scattering that share of the computation that they run beside;
    - the optimizer waits for all gradients of its rank, and nobody computes beside it. A step ends with its last rank.

    Left out: reading data, the gradient's norm, the gradient of a matrix that both ends of a pipeline share, and
    whoever is late without a reason that the plan knows.

    Args:
        plan: what to run.
        hardware: on what.
        software: how; None = this lab's own trainer.

    Returns:
        A trace with origin "predicted", step 0: computations, in them their sums over tp (under sp each is an
        all-gather and a reduce-scatter), sends and receives, and of each rank the collective over
        dp, the optimizer and the step. `step_time_s` and `bubble_fraction` make no events.

    Raises:
        PlanError: no plan or hardware, or a precision that the device does not have.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("llama3-405b"), Layout.parse("dp128 tp8 pp16 m128 bf16 zero1 sp"))
    >>> trace = step(built, Hardware.preset("h100"))
    >>> 30 < trace.step_time_s < 60, 0.1 < trace.bubble_fraction < 0.15
    (True, True)
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan {shown(plan)} is no Plan: use labkit.plan.build(model, layout).")
    if not isinstance(hardware, Hardware):
        raise PlanError(f"hardware {shown(hardware)} is no Hardware: use labkit.spec.Hardware.preset('h100').")
    if software is not None and not isinstance(software, Software):
        raise PlanError(f"software {shown(software)} is no Software: use labkit.predict.Software.preset('megatron').")
    clock = _clock(plan, hardware, Software() if software is None else software)
    return LazyTrace(plan, clock.totals, clock.events, clock.num_events)


@lru_cache(maxsize=64)
def _clock(plan: Plan, hardware: Hardware, software: Software) -> "_Clock":
    each, sends_s = stage_seconds(plan, hardware, software), send_seconds(plan, hardware, software)
    whole_s = [first + second for first, second in zip(each.inputs_s, each.weights_s, strict=True)]
    durations = {"F": each.forward_s, "B": whole_s, "I": each.inputs_s, "W": each.weights_s}
    found = _totals(plan, durations, sends_s)
    firsts = [plan.rank_at(pp_rank=pp_rank) for pp_rank in range(plan.layout.pp)]
    last_s = [sum(whole_s[stage] for stage in plan.stages(rank)) for rank in firsts]
    ends = tails(plan, hardware, software, last_s)
    step_s = max(end_s + tail.exposed_s for end_s, tail in zip(found.ends_s, ends, strict=True))
    return _Clock(plan, hardware, software, durations, sends_s, ends, StepTotals(step_s, found.bubble_fraction))


def _totals(plan: Plan, durations: dict[str, list[float]], sends_s: list[float]) -> Totals:
    layout = plan.layout
    if plan.schedule is None:
        name = layout.schedule if plan.num_stages > 1 else "1f1b"
        return totals(name, layout.pp, layout.num_microbatches, layout.num_virtual_stages, durations, sends_s)
    starts = execute(plan.schedule, durations, sends_s)
    each_s = [[durations[action.kind][action.stage] for action in line] for line in plan.schedule]
    ends_s = tuple(start_s[-1] + line_s[-1] for start_s, line_s in zip(starts, each_s, strict=True))
    return Totals(ends_s, tuple(sum(line_s) for line_s in each_s))


@dataclass(frozen=True)
class _Clock:
    """What a plan's actions take, and the events that follow from it."""

    plan: Plan
    hardware: Hardware
    software: Software
    durations: dict[str, list[float]]
    sends_s: list[float]
    tails: list[Tail]
    totals: StepTotals

    @cached_property
    def sums(self) -> dict[str, list[list[float]]]:
        """Bytes of every sum over tp, of each kind of action at each stage."""
        return stage_sums(self.plan, self.software)

    @cached_property
    def starts(self) -> dict[Action, float]:
        """When every computation starts, of one pipeline; the others do the same at the same time."""
        lines = self.plan.actions
        placed = execute(lines, self.durations, self.sends_s)
        return {
            action: at for line, at_s in zip(lines, placed, strict=True) for action, at in zip(line, at_s, strict=True)
        }

    @cached_property
    def ends_s(self) -> list[float]:
        """When each pipeline rank ends its last computation."""
        lasts = [line[-1] for line in self.plan.actions]
        return [self.starts[last] + self.durations[last.kind][last.stage] for last in lasts]

    def events(self, rank: int) -> list[Event]:
        """What one rank does."""
        plan, pp_rank = self.plan, self.plan.placement(rank).pp_rank
        members = plan.group_ranks("pp", rank)
        homes = [members[plan.pp_rank_of(stage)] for stage in range(plan.num_stages)]
        peers = {stage: home for stage, home in enumerate(homes) if home != rank}
        found = []
        for action in plan.actions[pp_rank]:
            found += action_events(action, rank, peers, self.starts, self.durations, self.sends_s)
            found += self._sums(action, rank)
        return found + self._end(rank, self.tails[pp_rank], self.ends_s[pp_rank])

    def _sums(self, action: Action, rank: int) -> list[Event]:
        """What an action sums over tp, spread evenly over it."""
        sizes = self.sums.get(action.kind, [[]] * self.plan.num_stages)[action.stage]
        group = reach(self.plan.layout.tp, 1, self.hardware.ranks_per_host)
        kinds = ("all_gather", "reduce_scatter") if self.plan.layout.sequence_parallel else ("all_reduce",)
        slot_s = self.durations[action.kind][action.stage] / max(1, len(sizes) * len(kinds))
        found: list[Event] = []
        for num_bytes in sizes:
            for kind in kinds:
                took_s = min(slot_s, collective_time(kind, num_bytes, group, self.hardware))
                start_s = self.starts[action] + (len(found) + 1) * slot_s - took_s
                found.append(
                    Event(
                        rank, kind, start_s, took_s, step=0, stage=action.stage, microbatch=action.microbatch,
                        group="tp", num_bytes=round(num_bytes),
                    )
                )  # fmt: skip
        return found

    def _end(self, rank: int, tail: Tail, end_s: float) -> list[Event]:
        """Gradients, optimizer and weights of a rank, and the step, which every rank ends with the last."""
        step_s = max(at_s + each.exposed_s for at_s, each in zip(self.ends_s, self.tails, strict=True))
        found, at_s = [Event(rank, "step", 0.0, step_s, step=0)], end_s - tail.hidden_s
        for kind, duration_s, num_bytes in tail.calls():
            group = None if kind == "optimizer" else "dp"
            found.append(Event(rank, kind, at_s, duration_s, step=0, group=group, num_bytes=num_bytes))
            at_s += duration_s
        return found

    def num_events(self, pp_rank: int) -> int:
        """How many events a rank has."""
        sends_s, count = self.sends_s, 1 + len(self.tails[pp_rank].calls())
        each = 2 if self.plan.layout.sequence_parallel else 1
        for action in self.plan.actions[pp_rank]:
            count += 1
            if action.kind != "W":
                stage = action.stage
                count += each * len(self.sums[action.kind][stage])
                count += bool(stage and sends_s[stage - 1]) + bool(stage < len(sends_s) and sends_s[stage])
        return count
