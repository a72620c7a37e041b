"""When every action of a plan runs, from its schedule's dependencies and declared durations."""

from collections.abc import Iterator, Mapping, Sequence

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.predict.execution import execute
from labkit.schedule import COMPUTE, Action
from labkit.spec.checks import number, shown, whole
from labkit.trace import Event, Trace
from labkit.trace.lazy import MOST_EVENTS

__all__ = ["action_events", "bubble_fraction", "timeline"]


def timeline(
    plan: Plan | Sequence[Sequence[Action]],
    forward_s: float | Sequence[float] = 1.0,
    backward_s: float | Sequence[float] = 2.0,
    send_s: float = 0.0,
) -> Trace:
    r"""Predict one step: each rank runs its actions in order, each as soon as its inputs are there.

    Sends leave when the computation ends, take `send_s`, and overlap with further computation. Ranks of one pp rank
    do the same at the same time.

    Args:
        plan: what to run; or a schedule that was written by hand: its computations, one list per rank.
        forward_s: seconds of a forward of one micro-batch, for every stage or for each stage.
        backward_s: seconds of a backward, likewise; input and weight gradients of a split backward take half each.
        send_s: seconds from the end of a computation until the next stage has its result.

    Returns:
        A trace with origin "predicted", step 0: F and B (or I and W), with `send_s > 0` also sends and receives, and a
        "step" of each rank.

    Raises:
        PlanError: a duration that is no number of 0 or more, a list whose length is not the number of stages, more
            than 2,000,000 events, or a schedule of other actions or one that stops half-way.

    >>> from labkit import plan, schedule, spec
    >>> small = plan.build(spec.Model.preset("tiny"), spec.Layout.parse("pp2 m2 gpipe"))
    >>> trace = timeline(small, forward_s=1.0, backward_s=2.0)
    >>> trace.step_time_s, round(trace.bubble_fraction, 4)
    (9.0, 0.3333)
    >>> timeline(schedule.parse_actions("0F0 0B0 0F1 0B1 \n 1F0 1B0 1F1 1B1")).step_time_s
    12.0
    """
    send_s = number("send_s", send_s)
    _check_number_of_events(plan, has_sends=send_s > 0)
    lines = plan.actions if isinstance(plan, Plan) else _lines(plan)
    rank_of = {action.stage: rank for rank, line in enumerate(lines) for action in line}
    num_stages = max(rank_of, default=0) + 1
    backwards_s = _durations("backward_s", backward_s, num_stages)
    halves_s = [each / 2 for each in backwards_s]
    forwards_s = _durations("forward_s", forward_s, num_stages)
    durations = {"F": forwards_s, "B": backwards_s, "I": halves_s, "W": halves_s}
    sends_s = [send_s if rank_of.get(stage) != rank_of.get(stage + 1) else 0.0 for stage in range(num_stages - 1)]
    placed = execute(lines, durations, sends_s)
    starts = {
        action: at for line, at_s in zip(lines, placed, strict=True) for action, at in zip(line, at_s, strict=True)
    }
    end_s = max((start_s + durations[action.kind][action.stage] for action, start_s in starts.items()), default=0.0)
    events = []
    for rank, (line, members) in enumerate(_ranks(plan, lines)):
        events.append(Event(rank, "step", 0.0, end_s, step=0))
        peers = {stage: members[other] for stage, other in rank_of.items() if members[other] != rank}
        for action in line:
            events += action_events(action, rank, peers, starts, durations, sends_s)
    return Trace(events, "predicted", plan if isinstance(plan, Plan) else None)


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Return (p - 1) / (m + p - 1), the bubble of gpipe and 1f1b with p equal stages and m micro-batches.

    Idle over total time (Huang et al. 2019, arXiv 1811.06965, section 2.3); Narayanan et al. 2021 (arXiv 2104.04473)
    divide by the ideal time instead, which gives (p - 1) / m.

    Raises:
        PlanError: a number below 1 or no integer.

    >>> round(bubble_fraction(4, 8), 4)
    0.2727
    """
    num_stages, num_microbatches = whole("num_stages", num_stages), whole("num_microbatches", num_microbatches)
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def _check_number_of_events(plan: object, *, has_sends: bool) -> None:
    """Refuse a plan before its actions are made."""
    if not isinstance(plan, Plan):
        return
    num_computations = 2 if plan.layout.schedule in ("gpipe", "1f1b") else 3
    each = num_computations + (4 if has_sends else 0)
    num_events = plan.world_size * (1 + plan.layout.num_microbatches * plan.layout.num_virtual_stages * each)
    if num_events > MOST_EVENTS:
        raise PlanError(
            f"layout '{plan.layout}' has up to {num_events} events and a timeline holds {MOST_EVENTS}: "
            f"use fewer ranks or micro-batches."
        )


def _lines(actions: object) -> list[list[Action]]:
    """A schedule that was written by hand, as far as it can be timed."""
    if not isinstance(actions, list | tuple) or not all(isinstance(line, list | tuple) for line in actions):
        raise PlanError(
            f"plan {shown(actions)} is no Plan: use labkit.plan.build(model, layout), or a schedule, one list of "
            f"actions per rank."
        )
    for rank, line in enumerate(actions):
        for action in line:
            if not isinstance(action, Action) or action.kind not in COMPUTE:
                raise PlanError(
                    f"rank {rank} holds {shown(action)}: a timeline times computations and adds sends itself. "
                    f"Use F and B, or I and W for B."
                )
    return [list(line) for line in actions]


def _ranks(
    plan: Plan | Sequence[Sequence[Action]], lines: list[list[Action]]
) -> Iterator[tuple[list[Action], Sequence[int]]]:
    """What each rank runs, and the ranks of its pipeline."""
    if not isinstance(plan, Plan):
        yield from ((line, range(len(lines))) for line in lines)
        return
    for rank in range(plan.world_size):
        yield lines[plan.placement(rank).pp_rank], plan.group_ranks("pp", rank)


def _durations(name: str, value: float | Sequence[float], num_stages: int) -> list[float]:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) != num_stages:
            raise PlanError(f"{name} has {len(value)} entries but there are {num_stages} stages: give one for each.")
        return [number(f"{name}[{stage}]", each) for stage, each in enumerate(value)]
    return [number(name, value)] * num_stages


def action_events(
    action: Action,
    rank: int,
    peers: Mapping[int, int],
    starts: Mapping[Action, float],
    durations: Mapping[str, Sequence[float]],
    sends_s: Sequence[float],
) -> list[Event]:
    """Return an action of a rank as events: the computation, what it sends, what it received for it.

    Args:
        action: a computation.
        rank: who does it.
        peers: stages of other ranks of its pipeline -> the rank that holds them.
        starts: when every action starts.
        durations: kind -> seconds at each stage.
        sends_s: seconds from each stage to the next; messages that take none are left out.
    """
    stage, microbatch = action.stage, action.microbatch

    def event(kind: str, start_s: float, duration_s: float, peer: int | None = None) -> Event:
        return Event(rank, kind, start_s, duration_s, step=0, stage=stage, microbatch=microbatch, peer=peer)

    start_s, duration_s = starts[action], durations[action.kind][stage]
    result = [event(action.kind, start_s, duration_s)]
    if action.kind == "W":
        return result
    letter = "F" if action.kind == "F" else "B"
    source, target = (stage - 1, stage + 1) if letter == "F" else (stage + 1, stage - 1)
    if target in peers and (send_s := sends_s[min(stage, target)]):
        result.append(event(f"SEND_{letter}", start_s + duration_s, send_s, peers[target]))
    if source in peers and (send_s := sends_s[min(stage, source)]):
        sender = next(each for kind in (letter, "I") if (each := Action(source, kind, microbatch)) in starts)
        sent_s = starts[sender] + durations[sender.kind][source]
        result.append(event(f"RECV_{letter}", sent_s, send_s, peers[source]))
    return result
