"""Pictures that compare: amounts by parts, a prediction over a run, the bubbles of schedules."""

import pytest

from labkit import plan, predict, show
from labkit.errors import PlanError
from labkit.spec import Layout, Model
from labkit.trace import Trace

PARTS = {"stage 0": {"weights": 2.0, "gradients": 3.0}, "stage 1": {"weights": 2.0, "gradients": 0.5}}


def traces(text: str = "pp2 m4") -> tuple[Trace, Trace]:
    built = plan.build(Model.preset("tiny"), Layout.parse(text))
    foretold = predict.timeline(built, forward_s=0.02, backward_s=0.04)
    slower = predict.timeline(built, forward_s=0.03, backward_s=0.06)
    return foretold, Trace(slower.events, "measured", built)


def test_parts_stand_on_each_other_and_carry_their_sum() -> None:
    figure = show.stacked({"8 ranks": PARTS, "64 ranks": PARTS}, title="held", unit="GiB")
    assert figure.layout.barmode == "stack"
    bars = [one for one in figure.data if one.type == "bar"]
    assert [(one.name, list(one.y), one.showlegend) for one in bars] == [
        ("weights", [2.0, 2.0], True),
        ("gradients", [3.0, 0.5], True),
        ("weights", [2.0, 2.0], False),
        ("gradients", [3.0, 0.5], False),
    ]
    sums = [one for one in figure.data if one.type == "scatter" and one.mode == "text"]
    assert [list(one.text) for one in sums] == [["5", "2.5"]] * 2
    assert [one.text for one in figure.layout.annotations] == ["8 ranks", "64 ranks"]


def test_a_limit_and_marks_are_inside_the_picture() -> None:
    figure = show.stacked(
        {"": PARTS}, title="held", unit="GiB", limit=("a GPU", 4.0), marks=("if all were cut", {"stage 1": 9.0})
    )
    assert figure.layout.yaxis.range[1] > 9.0
    (marks,) = [one for one in figure.data if one.type == "scatter" and one.mode == "markers"]
    assert (list(marks.x), list(marks.y)) == (["stage 1"], [9.0])
    assert [one.text for one in figure.layout.annotations] == ["a GPU"]


@pytest.mark.parametrize("panels", [{}, {"8 ranks": {}}])
def test_nothing_to_stack_is_said(panels: dict) -> None:
    with pytest.raises(PlanError, match="nothing to draw"):
        show.stacked(panels, title="held", unit="GiB")


def test_a_prediction_lies_over_the_run_from_the_same_moment() -> None:
    foretold, seen = traces()
    figure = show.overlay(foretold, seen)
    pale = [one for one in figure.data if one.opacity < 1]
    full = [one for one in figure.data if one.opacity == 1]
    assert [one.name for one in pale] == [one.name for one in full] == ["forward", "backward"]
    assert min(full[0].base) == min(pale[0].base) == 0
    assert max(full[1].base) == pytest.approx(1.5 * max(pale[1].base))
    assert figure.layout.xaxis.range[1] == pytest.approx(450 * 1.005)
    assert "300 ms, bubble 20.0 %" in figure.layout.title.text
    assert "450 ms, bubble 20.0 %" in figure.layout.title.text


def test_an_overlay_takes_the_shortest_step_and_refuses_what_it_cannot_draw() -> None:
    foretold, seen = traces()
    with pytest.raises(PlanError, match="step=7 is not in the run, its steps are 0 to 0"):
        show.overlay(foretold, seen, step=7)
    with pytest.raises(PlanError, match="the run has 0 forwards and backwards"):
        show.overlay(foretold, Trace([]))


def test_bubbles_are_shares_of_the_step() -> None:
    figure = show.bubbles({"1f1b": traces(), "gpipe": traces("pp2 m4 gpipe")})
    assert [one.name for one in figure.data] == ["predicted", "measured"]
    assert list(figure.data[0].x) == pytest.approx([20.0, 20.0])
    with pytest.raises(PlanError, match="0 schedules"):
        show.bubbles({})
