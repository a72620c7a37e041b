"""Lay the live training state out anew: another plan for the same model, in the same processes."""

import html
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from labkit.errors import LabError, PlanError, RankTimeout, ranks_text
from labkit.launch import submit
from labkit.launch.progress import Line
from labkit.plan import Moves, Plan, moves
from labkit.spec.checks import flag

if TYPE_CHECKING:
    from labkit.cluster import Ranks

__all__ = ["Switch", "switch"]

DESCRIBE = "labkit.rank.switching:describe"
SWITCH = "labkit.rank.switching:switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A change of layout that was made.

    Attributes:
        moves: from which plan to which; `.num_bytes` and `.matrix` say what went between ranks.
        step: the steps that the state has done: where the next run goes on.
        seconds: from the call until every rank could go on.
        build_s: of those, making the new groups and modules, on the rank that took longest.
        move_s: of those, exchanging weights and optimizer states, on the rank that took longest.
    """

    moves: Moves
    step: int
    seconds: float
    build_s: float
    move_s: float

    @property
    def before(self) -> Plan:
        """The plan that the state had."""
        return self.moves.before

    @property
    def after(self) -> Plan:
        """The plan that it has now."""
        return self.moves.after

    @property
    def num_bytes(self) -> int:
        """Bytes that went from one rank to another."""
        return self.moves.num_bytes

    def __repr__(self) -> str:
        return f"<Switch at step {self.step}: {_headline(self.moves)} in {self.seconds:.2f} s>"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"


def switch(ranks: "Ranks", plan: Plan, *, progress: bool = True, timeout_s: float = 600.0) -> Switch:
    """Give the ranks' live training state another layout; `train(ranks, plan, start="live")` then goes on under it.

    Weights, AdamW's moments and step counts, and the position in the data are those of before, bit for bit: with the
    same global batch size the next losses are what the old layout would have given, but for rounding. The layout may
    take more ranks or fewer. Another precision changes what computes, not the state, which is fp32. A state that has
    the plan already stays as it is.

    The new state is made beside the old one. Where the change fails on every rank alike, the old state stays live;
    where ranks were interrupted, lost or freed in the middle of it, there is none any more, and `start="live"` says so.

    Args:
        ranks: ranks that hold a live state, of an earlier `train`.
        plan: for the same model.
        progress: show what goes on in one line.
        timeout_s: how long it may take; then the ranks are freed.

    Returns:
        What was moved, and how long it took.

    Raises:
        PlanError: no live state, another model, a plan that does not fit the ranks or their memory: nothing moved.
        ClusterError: ranks are dead, or busy with a run.
        RankError, RankLost, RankTimeout: it failed on the way.
    """
    start_s = time.monotonic()
    submit.check_are_ranks(ranks)
    submit.check_plan(plan, len(ranks))
    line = Line() if flag("progress", progress) else None
    submit.check_ranks(ranks)
    live = _live(ranks.run(DESCRIBE, timeout_s=timeout_s))
    planned = moves(live["plan"], plan, live["optimizer"])
    stays = live["plan"] == plan
    if ranks.backend == "gloo" and not stays:  # the old state stands beside the new one till the end
        submit.check_memory(plan, live["optimizer"], psutil.virtual_memory().available)
    if line is not None:
        line.update(f"switch {_headline(planned)}")
    seconds = [] if stays else _move(ranks, planned, live["step"], timeout_s)
    done = Switch(
        moves=planned,
        step=live["step"],
        seconds=time.monotonic() - start_s,
        build_s=max((one["build_s"] for one in seconds), default=0.0),
        move_s=max((one["move_s"] for one in seconds), default=0.0),
    )
    if line is not None:
        line.update(f"switch {_headline(planned)} in {done.seconds:.2f} s", final=True)
    return done


def _move(ranks: "Ranks", planned: Moves, step: int, timeout_s: float) -> list[dict[str, float]]:
    try:
        seconds: list[dict[str, float]] = ranks.run(SWITCH, planned, step, timeout_s=timeout_s)
    except RankTimeout as error:
        try:
            ranks.interrupt()
            then = "They were freed, and there is no live training state any more. Use a longer timeout_s."
        except LabError as stuck:
            then = f"They could not be freed: {stuck}"
        raise RankTimeout(
            f"{ranks_text(error.missing)} did not finish the switch to '{planned.after.layout}' within "
            f"{timeout_s:g} s. {then}",
            missing=error.missing,
            action="switch",
            step=step,
        ) from None
    return seconds


def _live(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The one live state of the ranks.

    Raises:
        PlanError: there is none, or ranks do not agree on it.
    """
    first = found[0]
    if "why_none" in first:
        raise PlanError(first["why_none"])
    others = [rank for rank, one in enumerate(found[: first["plan"].world_size]) if one != first]
    if others:
        raise PlanError(
            f"{ranks_text(others)} of {first['plan'].world_size} {'has' if len(others) == 1 else 'have'} not the live "
            f"state of rank 0, which is of '{first['plan'].layout}' at step {first['step']}: a switch begins with one "
            "state on all ranks. Train with start='fresh'."
        )
    return first


def _headline(planned: Moves) -> str:
    return f"{planned.before.layout} → {planned.after.layout}, {planned.num_bytes / 1e6:,.1f} MB between ranks"
