"""The cockpit runs the layout of its controls, draws what ran, and leaves nothing behind."""

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from labkit import launch, plan, predict, show, widgets
from labkit.errors import ClusterError, LabError, PlanError, RankTimeout
from labkit.spec import Layout, Model, Pace
from labkit.trace import Event, Trace
from labkit.widgets.choices import AXES, Choices
from labkit.widgets.cockpit import declared_pace
from labkit.widgets.live import THREAD_NAME, Live, NewestStep
from labkit.widgets.pictures import Pictures

TINY = Model.preset("tiny")
WAIT_S = 120.0


def test_declared_work_is_the_same_in_every_layout() -> None:
    choices = Choices.of(4, TINY)
    for text in ("dp4", "tp4", "pp4 m16", "dp2 pp2 m4", "tp2 pp2 gpipe m8", "dp2 pp2 zbv v2 m4"):
        layout = choices.nearest(Layout.parse(text))
        pace = declared_pace(layout)
        trace = predict.timeline(plan.build(TINY, layout), forward_s=pace.forward_s, backward_s=pace.backward_s)
        work = sum(event.duration_s for event in trace.events if event.kind in ("F", "B", "I", "W"))
        assert work == pytest.approx(16 * 0.06 * 3)


def timeline(text: str, *, paced: bool = True) -> go.Figure:
    pace = Pace(forward_s=0.01, backward_s=0.02)
    built = plan.build(TINY, Layout.parse(text))
    trace = predict.timeline(built, forward_s=pace.forward_s, backward_s=pace.backward_s)
    return show.timeline(replace(trace, pace=pace if paced else None))


def test_the_page_gets_whole_figures() -> None:
    pictures = Pictures(predicted=timeline("pp4 m8"), measured=timeline("pp4 m8"), losses=show.losses({}))
    for text in ("dp2 pp2 m2", "pp4 gpipe m8", "dp4"):
        pictures.draw("predicted", timeline(text))
        sent = json.loads(pictures.predicted)
        assert text.split()[0] in sent["layout"]["title"]["text"]
        assert len(sent["data"]) == len(pictures.figures["predicted"].data)
    pictures.draw("losses", show.losses({"a": [1.0, 2.0], "b": [3.0]}))
    assert [curve["name"] for curve in json.loads(pictures.losses)["data"]] == ["a", "b"]
    assert "Plotly" in pictures.plotly
    pictures.close()


def test_paced_timelines_share_one_time_scale_and_others_do_not() -> None:
    short, long = timeline("dp4"), timeline("pp4 m8")
    pictures = Pictures(predicted=short, measured=show.timeline(Trace([])), losses=show.losses({}))
    own = short.layout.xaxis.range[1]
    pictures.draw("measured", long)
    assert short.layout.xaxis.range == long.layout.xaxis.range
    assert short.layout.xaxis.range[1] > own
    assert json.loads(pictures.predicted)["layout"]["xaxis"]["range"][1] == short.layout.xaxis.range[1]
    pictures.draw("measured", timeline("pp4 m8", paced=False))
    assert short.layout.xaxis.range[1] == own
    pictures.close()


def test_only_whole_steps_are_drawn() -> None:
    steps = NewestStep(2)
    steps.add([Event(0, "F", 0.0, 1.0, step=0)])
    assert steps.events() == []
    steps.add([Event(1, "F", 0.0, 1.0, step=0), Event(0, "F", 2.0, 1.0, step=1)])
    assert {event.step for event in steps.events()} == {0}
    steps.add([Event(1, "F", 2.0, 1.0, step=1)])
    assert {event.step for event in steps.events()} == {1}
    assert len(steps.events()) == 2


class ScriptedRun:
    """A run whose progress a test decides; for the logic of following, nothing else."""

    def __init__(self) -> None:
        self.plan = plan.build(TINY, Layout.parse("dp2"))
        self.state = "running"
        self.losses: list[float] = []
        self.stops = 0

    def poll(self) -> SimpleNamespace:
        step = len(self.losses)
        events = [Event(rank, "F", float(step), 1.0, step=step - 1) for rank in (0, 1)] if step else []
        return SimpleNamespace(step=step, losses=tuple(self.losses), events=events, state=self.state)

    def stop(self, timeout_s: float = 60.0) -> None:
        self.stops += 1
        if self.stops < 2:
            raise RankTimeout("the step is not over", missing=[0])
        self.state = "stopped"


def test_a_run_is_followed_to_its_end_and_stop_is_asked_until_it_holds() -> None:
    run: Any = ScriptedRun()
    drawn: list[int] = []
    ended = threading.Event()
    live = Live(run, lambda run, events: drawn.append(len(events)), lambda run: ended.set())
    run.losses.append(1.0)
    wait_for(lambda: 2 in drawn)
    live.stop()
    assert live.wait(WAIT_S)
    assert ended.is_set()
    assert run.stops == 2
    assert drawn[-1] == 0
    assert followers() == []


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def wait_for(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class NoRanks:
    """As many as it says, and nothing that answers: enough to move sliders."""

    stopped = False

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def __len__(self) -> int:
        return self.num_ranks


def test_the_cockpit_of_stopped_ranks_is_refused() -> None:
    ranks: Any = NoRanks(4)
    ranks.stopped = True
    with pytest.raises(ClusterError, match="these ranks were stopped"):
        widgets.cockpit(ranks)


def test_the_cockpit_does_not_keep_ranks_alive() -> None:
    ranks: Any = NoRanks(4)
    cockpit = widgets.cockpit(ranks)
    reference = weakref.ref(ranks)
    del ranks
    gc.collect()
    assert reference() is None
    cockpit.start()
    assert "0 ranks are up" in cockpit.view.status.value
    assert cockpit.run is None
    with pytest.raises(PlanError, match="nothing was run yet"):
        cockpit.wait(1.0)
    cockpit.close()


def test_an_impossible_choice_is_refused_beside_its_control_and_the_nearest_is_a_press_away() -> None:
    ranks: Any = NoRanks(4)
    cockpit = widgets.cockpit(ranks)
    cockpit.layout = Layout.parse("dp4 m4")
    cockpit.view.axes["schedule"].value = "zbv"
    row = cockpit.view.rows["schedule"]
    assert cockpit.refusal is not None
    assert str(cockpit.layout) == "dp4 m4"
    assert cockpit.view.axes["schedule"].value == "zbv"
    assert shown_cards(cockpit) == ["schedule"]
    assert "pp=1 with schedule=" in row.box.children[-1].children[0].value
    assert "does not run" in cockpit.view.layout_text.value
    assert cockpit.view.run.disabled
    cockpit.start()
    assert "pp=1 with schedule=" in cockpit.view.status.value
    row.use.click()
    assert str(cockpit.layout) == "dp2 pp2 zbv v2 m4 b2"
    assert (cockpit.refusal, shown_cards(cockpit), cockpit.view.run.disabled) == (None, [], False)
    assert "engine torch" in cockpit.view.layout_text.value
    cockpit.close()


def test_a_refused_choice_can_be_mended_by_another_control() -> None:
    ranks: Any = NoRanks(4)
    cockpit = widgets.cockpit(ranks)
    cockpit.layout = Layout.parse("dp4 m4")
    cockpit.view.axes["sequence_parallel"].value = True
    assert shown_cards(cockpit) == ["sequence_parallel"]
    cockpit.view.axes["tp"].value = 2
    assert (str(cockpit.layout), shown_cards(cockpit)) == ("dp2 tp2 m4 b2 sp", [])
    cockpit.close()


def shown_cards(cockpit: widgets.Cockpit) -> list[str]:
    return [axis for axis, row in cockpit.view.rows.items() if row.box.children[-1].layout.display != "none"]


def test_a_cockpit_on_one_rank_has_nothing_to_slide_but_microbatches() -> None:
    ranks: Any = NoRanks(1)
    cockpit = widgets.cockpit(ranks)
    assert cockpit.view.axes["dp"].disabled
    assert not cockpit.view.axes["num_microbatches"].disabled
    cockpit.close()


def test_an_unexpected_error_is_one_line_in_the_cockpit() -> None:
    ranks: Any = NoRanks(4)  # no rank behind it: train fails on it
    ranks.clock_offsets = dict
    cockpit = widgets.cockpit(ranks)
    cockpit.start()
    assert "AttributeError" in cockpit.view.status.value
    assert "Traceback" not in cockpit.view.status.value
    cockpit.close()


@pytest.fixture
def cockpit(ranks: Any) -> Iterator[widgets.Cockpit]:
    made = widgets.cockpit(ranks, num_steps=3)
    yield made
    if made.run is not None:
        made.stop()
        made.wait(WAIT_S)
    made.close()


@pytest.mark.ranks
def test_sliders_move_together_and_the_prediction_follows(cockpit: widgets.Cockpit) -> None:
    before = cockpit.figures["predicted"].layout.title.text
    cockpit.view.axes["pp"].value = 4
    assert cockpit.layout.world_size == 4
    assert {axis: control.value for axis, control in cockpit.view.axes.items()} == {
        axis: getattr(cockpit.layout, axis) for axis in AXES
    }
    title = cockpit.figures["predicted"].layout.title.text
    assert title != before
    assert str(cockpit.layout) in title
    assert "paced: durations as declared" in title
    cockpit.view.paced.value = False
    assert "paced" not in cockpit.figures["predicted"].layout.title.text
    cockpit.layout = Layout(dp=2, tp=2)
    assert cockpit.view.axes["tp"].value == 2


@pytest.mark.ranks
def test_run_trains_on_the_ranks_and_draws_what_they_did(cockpit: widgets.Cockpit) -> None:
    cockpit.layout = Layout.parse("dp2 pp2 m4")
    cockpit.view.run.click()
    assert cockpit.run is not None, cockpit.view.status.value
    run = cockpit.wait(WAIT_S)
    assert (run.state, run.error) == ("done", None)
    assert list(cockpit.figures["losses"].data[0].y) == run.losses
    title = cockpit.figures["measured"].layout.title.text
    assert "Measured" in title
    assert "paced: durations as declared" in title
    drawn = next(bars for bars in cockpit.figures["measured"].data if bars.name == "forward")
    assert len(drawn.x) == sum(event.kind == "F" and event.step == 2 for event in run.trace.events) > 0
    assert followers() == []
    assert not cockpit.view.run.disabled
    assert "Done: 3 steps" in cockpit.view.status.value


@pytest.mark.ranks
def test_a_second_layout_lies_over_the_first(cockpit: widgets.Cockpit) -> None:
    cockpit.view.paced.value = False
    for text in ("dp4", "tp2 pp2 m4"):
        run(cockpit, text, 3)
    first, second = cockpit.figures["losses"].data
    assert first.name != second.name
    np.testing.assert_allclose(first.y, second.y, rtol=1e-5)


@pytest.mark.ranks
def test_training_goes_on_under_another_layout_as_if_nothing_had_changed(cockpit: widgets.Cockpit) -> None:
    cockpit.view.paced.value = False
    run(cockpit, "dp4", 6)
    run(cockpit, "dp2 pp2 m4", 3)
    cockpit.view.begin.value = "live"
    last = run(cockpit, "tp4", 2)
    assert (last.training.start, last.plan.layout.tp) == ("live", 4)
    assert "Switched in" in cockpit.view.status.value
    run(cockpit, "tp4", 1)
    whole, changed = cockpit.figures["losses"].data
    assert changed.name == "dp2 pp2 1f1b m4 b2 → tp4 b16"
    np.testing.assert_allclose(changed.y, whole.y, rtol=1e-5)
    (mark,) = cockpit.figures["losses"].layout.shapes
    assert mark.x0 == 2.5


@pytest.mark.ranks
def test_a_training_that_a_cell_began_can_go_on(cockpit: widgets.Cockpit, ranks: Any) -> None:
    cockpit.view.paced.value = False
    cell = launch.train(ranks, plan.build(TINY, Layout.parse("dp4 b4")), 2, seed=7, progress=False)
    launch.switch(ranks, plan.build(TINY, Layout.parse("tp4 b16")), progress=False)
    cockpit.view.begin.value = "live"
    went_on = run(cockpit, "dp4 b4", 1)
    (curve,) = cockpit.figures["losses"].data
    assert (list(curve.y), went_on.training.seed) == ([*cell.losses, *went_on.losses], 7)


def run(cockpit: widgets.Cockpit, text: str, num_steps: int) -> launch.Run:
    cockpit.layout = Layout.parse(text)
    cockpit.view.num_steps.value = num_steps
    cockpit.view.run.click()
    assert cockpit.run is not None, cockpit.view.status.value
    ended = cockpit.wait(WAIT_S)
    assert (ended.state, ended.error) == ("done", None)
    return ended


@pytest.mark.ranks
def test_stop_ends_a_run_after_its_step_and_a_second_run_meanwhile_is_refused(cockpit: widgets.Cockpit) -> None:
    cockpit.view.num_steps.value = 1000
    cockpit.view.run.click()
    run = cockpit.run
    assert run is not None, cockpit.view.status.value
    wait_for(lambda: len(run.losses) > 0)
    cockpit.start()
    assert "a run is still going on" in cockpit.view.status.value
    assert cockpit.run is run
    cockpit.view.stop.click()
    assert cockpit.wait(WAIT_S) is run
    assert run.state == "stopped"
    assert 0 < len(run.losses) < 1000
    assert followers() == []
    assert cockpit.view.stop.disabled


@pytest.mark.ranks
def test_a_wait_that_is_too_short_says_where_the_run_is(cockpit: widgets.Cockpit) -> None:
    cockpit.view.num_steps.value = 1000
    cockpit.view.run.click()
    with pytest.raises(RankTimeout, match=r"did not end within 0\.01 s"):
        cockpit.wait(0.01)


@pytest.mark.ranks
def test_a_failed_run_is_a_message(cockpit: widgets.Cockpit, ranks: Any) -> None:
    cockpit.view.num_steps.value = 1000
    cockpit.view.run.click()
    run = cockpit.run
    assert run is not None, cockpit.view.status.value
    wait_for(lambda: len(run.losses) > 0)
    ranks.interrupt()
    cockpit.wait(WAIT_S)
    assert run.state in ("failed", "stopped")
    assert isinstance(run.error, LabError | None)
    assert "Traceback" not in cockpit.view.status.value
    assert followers() == []


@pytest.mark.ranks
def test_a_cockpit_that_is_closed_during_a_run_follows_it_to_its_end(cockpit: widgets.Cockpit) -> None:
    cockpit.view.num_steps.value = 5
    cockpit.view.run.click()
    run = cockpit.run
    assert run is not None, cockpit.view.status.value
    cockpit.close()
    assert cockpit.wait(WAIT_S) is run
    assert run.state == "done"
    assert followers() == []


@pytest.mark.ranks
def test_stopping_the_ranks_ends_the_run_its_thread_and_is_a_message(own_ranks: Any) -> None:
    cockpit = widgets.cockpit(own_ranks, num_steps=1000)
    cockpit.view.run.click()
    run = cockpit.run
    assert run is not None, cockpit.view.status.value
    wait_for(lambda: len(run.losses) > 0)
    own_ranks.stop()
    cockpit.wait(WAIT_S)
    assert run.state in ("failed", "stopped")
    assert followers() == []
    cockpit.start()
    assert cockpit.run is run
    assert "stopped" in cockpit.view.status.value
    cockpit.close()


@pytest.mark.ranks
def test_a_killed_rank_is_named_in_the_cockpit(own_ranks: Any) -> None:
    cockpit = widgets.cockpit(own_ranks, num_steps=1000)
    cockpit.view.run.click()
    run = cockpit.run
    assert run is not None, cockpit.view.status.value
    wait_for(lambda: len(run.losses) > 0)
    own_ranks.kill(2)
    cockpit.wait(WAIT_S)
    assert run.state == "failed"
    assert "rank 2" in cockpit.view.status.value
    assert "Traceback" not in cockpit.view.status.value
    own_ranks.restart(2)
    cockpit.view.num_steps.value = 2
    cockpit.view.run.click()
    assert cockpit.wait(WAIT_S).state == "done"
    cockpit.close()
