"""A layout chosen with sliders: predicted at once, run on the live ranks, drawn while it runs."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from labkit import launch, predict, show
from labkit import plan as planning
from labkit.errors import ClusterError, LabError, PlanError, RankTimeout
from labkit.plan import Plan
from labkit.spec import Layout, Model, Pace
from labkit.trace import Event, Trace
from labkit.widgets.choices import AXES, Choices, Refusal
from labkit.widgets.curves import Curves
from labkit.widgets.live import Live
from labkit.widgets.pictures import Pictures
from labkit.widgets.view import View, build_view

if TYPE_CHECKING:
    from labkit.cluster import Ranks

# A sample's way through the whole model, forward; declared durations follow from it, so that every layout has
# the same work and only its bubbles and its communication differ.
SAMPLE_FORWARD_S = 0.06
BACKWARD_PER_FORWARD = 2.0

GOES_ON_WITH = ("seed", "data", "optimizer", "learning_rate", "betas", "weight_decay", "clip_norm", "fp8")
"""What a run that goes on takes over from the run before, which may be a cell's."""


def cockpit(ranks: "Ranks", model: Model | None = None, *, num_steps: int = 10) -> "Cockpit":
    """Show sliders for a layout on these ranks, its predicted schedule, and *Run*.

    Args:
        ranks: live ranks; the cockpit does not keep them alive.
        model: what to train; None: the preset "tiny".
        num_steps: how many steps *Run* takes, to begin with.
    """
    return Cockpit(ranks, Model.preset("tiny") if model is None else model, num_steps=num_steps)


class Cockpit:
    """Sliders around plan, predict and run. Shows itself as the last value of a cell.

    Attributes:
        layout: the layout that *Run* takes; assign one to move the controls (to the nearest that exists).
        refusal: why what the controls stand at is no layout; None while it is one.
        run: the newest run, or None.
        view: the widgets.
    """

    def __init__(self, ranks: "Ranks", model: Model, *, num_steps: int = 10) -> None:
        if not hasattr(ranks, "stopped"):
            raise PlanError(
                f"ranks is of type {type(ranks).__name__}: a cockpit runs on what lk.cluster.start(4) gave."
            )
        if ranks.stopped:
            raise ClusterError("these ranks were stopped: a cockpit runs on live ones. Use lk.cluster.start(4).")
        self._ranks = weakref.ref(ranks)
        self._num_up = len(ranks)
        self._choices = Choices.of(len(ranks), model)
        self._layout = self._choices.nearest(Layout(dp=max(1, len(ranks) // 2), pp=2))
        self._live: Live | None = None
        self._curves = Curves()
        self._switch: launch.Switch | None = None
        self._moving = False
        self.refusal: Refusal | None = None
        self.run: launch.Run | None = None
        plan = self._plan()
        self._pictures = Pictures(
            predicted=self._predicted(plan, paced=True),
            measured=show.timeline(_measured(plan, (), None)),
            losses=self._curves.figure(),
        )
        self.view: View = build_view(self._choices, self._pictures, num_steps)
        self._place_controls(self._layout)
        self._connect()
        self.view.say("Move a control: the numbers follow. Run trains on the ranks.")

    @property
    def layout(self) -> Layout:
        """The layout that *Run* takes."""
        return self._layout

    @layout.setter
    def layout(self, wish: Layout) -> None:
        self._take(self._choices.nearest(wish))

    @property
    def figures(self) -> dict[str, go.Figure]:
        """What is shown now: "predicted", "measured" and "losses"."""
        return dict(self._pictures.figures)

    def start(self) -> None:
        """What *Run* does: train under the layout, in the background. Errors become messages."""
        try:
            self._start()
        except LabError as error:
            self.view.say(str(error), "bad")
        except Exception as error:
            self.view.say(f"{type(error).__name__}: {error}", "bad")

    def stop(self) -> None:
        """What *Stop* does: end the run after its step; returns at once."""
        if self._live is not None and self.run is not None and self.run.state == "running":
            self.view.stop.disabled = True
            self.view.say("Stopping after this step. A step that hangs is freed by ranks.interrupt().")
            self._live.stop()

    def wait(self, timeout_s: float | None = None) -> launch.Run:
        """Wait until the run has ended and been drawn; what it failed with is in `run.error`.

        Raises:
            PlanError: nothing was run yet.
            RankTimeout: the run was still going on after `timeout_s`.
        """
        if self.run is None or self._live is None:
            raise PlanError("cockpit.run is None: nothing was run yet. Press Run, or call cockpit.start().")
        if not self._live.wait(timeout_s):
            world_size = self.run.plan.layout.world_size
            raise RankTimeout(
                f"the run did not end within {timeout_s:g} s: it is at step {len(self.run.losses)} of "
                f"{self.run.training.num_steps}. Wait longer, or press Stop.",
                missing=range(world_size),
                action="wait",
                step=len(self.run.losses),
            )
        return self.run

    def close(self) -> None:
        """Take the widgets out of the page and of memory; a run goes on."""
        self.view.close()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.view.box._repr_mimebundle_(**kwargs)

    def _connect(self) -> None:
        for axis, control in self.view.axes.items():
            control.observe(lambda change, axis=axis: self._moved(axis, change["new"]), names="value")
        for row in self.view.rows.values():
            row.use.on_click(lambda button: self._use_nearest())
        self.view.paced.observe(lambda change: self._show_layout(), names="value")
        self.view.run.on_click(lambda button: self.start())
        self.view.stop.on_click(lambda button: self.stop())

    def _moved(self, axis: str, value: Any) -> None:
        if self._moving:
            return
        wish = replace(self._layout if self.refusal is None else self.refusal.wish, **{axis: value})
        answer = self._choices.follow(wish, axis)
        if isinstance(answer, Layout):
            self._take(answer)
        else:
            self.refusal = answer
            self._place_controls(answer.wish)
            self.view.show_refusal(axis, answer)

    def _use_nearest(self) -> None:
        if self.refusal is not None:
            self._take(self.refusal.nearest)

    def _take(self, layout: Layout) -> None:
        self._layout, self.refusal = layout, None
        self.view.show_refusal(None, None)
        self._show_layout()

    def _show_layout(self) -> None:
        if self.refusal is None:
            self._place_controls(self._layout)
        self._pictures.draw("predicted", self._predicted(self._plan(), paced=self.view.paced.value))

    def _place_controls(self, layout: Layout) -> None:
        """Put every control where a layout is; only one that exists can be run."""
        self._moving = True
        try:
            for axis in AXES:
                self.view.axes[axis].value = getattr(layout, axis)
        finally:
            self._moving = False
        self._allow_buttons()
        used = self._choices.num_ranks
        ranks = f"{used} ranks" if used == self._num_up else f"{used} of {self._num_up} ranks"
        batch = f"dp {layout.dp} × m {layout.num_microbatches} × b {layout.microbatch_size}"
        engine = "does not run" if self.refusal else f"engine {self._plan().engine}"
        text = f"{ranks} · {engine}\nglobal batch {layout.global_batch_size} = {batch}"
        self.view.name_layout(str(layout), text)

    def _allow_buttons(self) -> None:
        is_running = self.run is not None and self.run.state == "running"
        self.view.run.disabled = is_running or self.refusal is not None
        self.view.stop.disabled = not is_running

    def _plan(self) -> Plan:
        return planning.build(self._choices.model, self._layout)

    def _predicted(self, plan: Plan, *, paced: bool) -> go.Figure:
        pace = declared_pace(plan.layout)
        trace = predict.timeline(plan, forward_s=pace.forward_s, backward_s=pace.backward_s)
        return show.timeline(replace(trace, pace=pace) if paced else trace)

    def _start(self) -> None:
        ranks = self._ranks()
        if ranks is None:
            raise ClusterError("0 ranks are up: they were stopped. Start new ones and a new cockpit.")
        if self._live is not None and not self._live.wait(0):
            raise ClusterError(
                "a run is still going on: ranks hold one training state. Press Stop, or wait for its end."
            )
        if self.refusal is not None:
            raise PlanError(self.refusal.reason)
        plan, start = self._plan(), self.view.begin.value
        pace = declared_pace(self._layout) if self.view.paced.value else None
        before = self._go_on(ranks, plan) if start == "live" else None
        settings = {} if before is None else {name: getattr(before.training, name) for name in GOES_ON_WITH}
        if plan.layout.precision != "fp8":
            settings.pop("fp8", None)
        num_steps = self.view.num_steps.value
        run = launch.train(ranks, plan, num_steps, start=start, pace=pace, block=False, progress=False, **settings)
        self._name_curve(str(plan.layout), before)
        self.run = run
        self._allow_buttons()
        self.view.say("Starting.")
        self._live = Live(self.run, self._draw, self._ended)

    def _go_on(self, ranks: "Ranks", plan: Plan) -> launch.Run:
        """Give the live training this layout, where it has another; returns the last run, whose samples go on.

        A cell may have switched since that run, so what the ranks hold is asked of them.
        """
        before = launch.last_run(ranks)
        if before is None:
            raise PlanError("nothing was run on these ranks: there is no training to go on with. Choose 'afresh'.")
        self.view.say(f"Going on under '{plan.layout}'.")
        switched = launch.switch(ranks, plan, progress=False)
        self._switch = switched if switched.before != plan else None
        return before

    def _name_curve(self, layout: str, before: launch.Run | None) -> None:
        """The losses to come are of a new curve, or go on with that of a run."""
        if before is None:
            self._switch = None
            self._curves.begin(layout)
            return
        if before is not self.run:  # it was started in a cell
            self._curves.begin(str(before.plan.layout), before.losses)
        self._curves.go_on(layout)

    def _draw(self, run: launch.Run, events: Sequence[Event]) -> None:
        """Draw a run as far as it is; runs on the thread that follows it."""
        losses = list(run.losses)
        ended = run.state != "running"
        trace = run.trace if ended else _measured(run.plan, events, run.training.pace)
        if trace.events:
            self._pictures.draw("measured", show.timeline(trace))
        self._curves.update(losses)
        self._pictures.draw("losses", self._curves.figure())
        if losses and not ended:
            self.view.say(f"Step {len(losses)} of {run.training.num_steps}, loss {losses[-1]:.4f}.")

    def _ended(self, run: launch.Run) -> None:
        self._allow_buttons()
        if run.error is not None:
            self.view.say(_summary(run.error), "bad")
            return
        speed = f", {run.tokens_per_s:,.0f} tokens/s" if run.tokens_per_s else ""
        last = f", loss {run.losses[-1]:.4f}" if run.losses else ""
        verb = "Done" if run.state == "done" else "Stopped"
        text = f"{verb}: {len(run.losses)} steps{last}{speed}."
        if self._switch is not None:
            text += f" Switched in {self._switch.seconds:.2f} s, {self._switch.num_bytes / 1e6:.1f} MB between ranks."
        self.view.say(text, "good" if run.state == "done" else "quiet")


def declared_pace(layout: Layout) -> Pace:
    """How long one forward and backward of a stage and micro-batch are declared to last.

    The samples of a micro-batch, divided over stages and tensor-parallel ranks: so the work of a step is the same
    in every layout of one global batch, and what differs is the bubble.

    >>> declared_pace(Layout(pp=2, num_microbatches=4, microbatch_size=2)).forward_s
    0.06
    """
    forward_s = SAMPLE_FORWARD_S * layout.microbatch_size / (layout.num_stages * layout.tp)
    return Pace(forward_s=forward_s, backward_s=BACKWARD_PER_FORWARD * forward_s)


def _measured(plan: Plan, events: Sequence[Event], pace: Pace | None) -> Trace:
    return Trace(events=tuple(events), origin="measured", plan=plan, pace=pace, aligned=True)


def _summary(error: BaseException) -> str:
    """The first paragraph of an error: a rank's traceback belongs in a cell, not in a message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
