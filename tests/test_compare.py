"""Comparing traces: gaps that were put in by hand are found, weighed and named."""

import math
import random
from dataclasses import replace

import pytest

from labkit import compare, plan, predict, show
from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.spec import Hardware, Layout, Model, Pace
from labkit.trace import Event, Trace

FORWARD_S, BACKWARD_S, SEND_S = 0.02, 0.04, 0.001


def built(text: str, model: Model | None = None, **fields) -> Plan:
    return plan.build(model or replace(Model.preset("tiny"), **fields), Layout.parse(text))


def with_end(trace: Trace, *, sum_s: float = 0.03, update_s: float = 0.01) -> Trace:
    """The trace with gradients summed over dp after the last computation, an optimizer and whole steps."""
    events = [event for event in trace.events if event.kind != "step"]
    last_s = max(event.end_s for event in events)
    for rank in trace.ranks:
        own_s = max(event.end_s for event in trace.events if event.rank == rank and event.kind in "FB")
        events += [
            Event(rank, "all_reduce", own_s, last_s + sum_s - own_s, step=0, group="dp"),
            Event(rank, "optimizer", last_s + sum_s, update_s, step=0),
            Event(rank, "step", 0.0, last_s + sum_s + update_s, step=0),
        ]
    return trace.with_events(events)


def foretold(text: str, forward_s=FORWARD_S, backward_s=BACKWARD_S, send_s=SEND_S, **fields) -> Trace:
    return with_end(predict.timeline(built(text, **fields), forward_s, backward_s, send_s))


def as_run(trace: Trace, **fields) -> Trace:
    return Trace(trace.events, "measured", **{"plan": trace.plan, **fields})


def slower(stage: int, num_stages: int, factor: float) -> dict[str, list[float]]:
    """Durations of stages of which one is slower."""
    factors = [factor if each == stage else 1.0 for each in range(num_stages)]
    return {"forward_s": [FORWARD_S * each for each in factors], "backward_s": [BACKWARD_S * each for each in factors]}


def check(found: compare.Comparison) -> None:
    """What holds of every comparison: gaps are the whole difference, largest first."""
    difference_s = found.step_time.difference
    assert sum(cause.seconds for cause in found.causes) == pytest.approx(difference_s, abs=1e-9)
    assert sum(cause.share for cause in found.causes) == pytest.approx(1.0 if difference_s else 0.0, abs=1e-6)
    sizes = [abs(cause.seconds) for cause in found.causes]
    assert sizes == sorted(sizes, reverse=True)
    assert found.sentence in str(found)
    assert found.sentence.endswith(".")


def test_a_slow_last_stage_is_named_with_what_it_holds():
    found = compare.traces(foretold("pp4 m8"), as_run(foretold("pp4 m8", **slower(3, 4, 1.31))))
    check(found)
    (row,) = [row for row in found.of("compute") if row.stage == 3]
    assert row.difference == pytest.approx(0.31 * 8 * (FORWARD_S + BACKWARD_S))
    assert row.ratio == pytest.approx(1.31)
    assert [row.difference for row in found.of("forward")] == pytest.approx([0, 0, 0, 0.31 * FORWARD_S])
    assert found.causes[0].what == "compute"
    assert (found.causes[0].stage, found.causes[0].share) == (3, pytest.approx(1.0, abs=0.01))
    assert found.sentence.startswith("Stage 3 is 31 % slower than predicted: it holds the output layer")
    assert {span.rank for span in found.causes[0].spans} == {3}
    spans_s = sum(span.end_s - span.start_s for span in found.causes[0].spans)
    assert spans_s == pytest.approx(row.difference)


@pytest.mark.parametrize(
    ("stage", "num_layers", "reason"),
    [
        (0, 4, "it holds the embedding, and it was predicted like the others"),
        (0, 6, "it has 2 layers and others 1, and it was predicted like the others"),
        (2, 4, "it has as many layers as the others, so see what else runs beside rank 2"),
    ],
)
def test_other_slow_stages(stage, num_layers, reason):
    predicted = foretold("pp4 m8", num_layers=num_layers)
    found = compare.traces(predicted, as_run(foretold("pp4 m8", **slower(stage, 4, 1.5), num_layers=num_layers)))
    check(found)
    assert found.sentence.startswith(f"Stage {stage} is 50 % slower than predicted: {reason}; that is ")


def test_a_late_rank():
    trace = foretold("pp4 m8")
    late = [replace(event, start_s=event.start_s + 0.05) for event in trace.events if event.kind != "step"]
    late += [Event(rank, "step", 0.0, trace.step_time_s + 0.05, step=0) for rank in trace.ranks]
    found = compare.traces(trace, as_run(trace.with_events(late)))
    check(found)
    assert [(cause.what, cause.rank) for cause in found.causes] == [("late start", 0)]
    assert found.causes[0].seconds == pytest.approx(0.05)
    assert found.causes[0].spans == (compare.Span(0, pytest.approx(0.0), pytest.approx(0.05)),)
    assert [row.difference for row in found.of("late start")] == pytest.approx([0.05] * 4)
    assert found.sentence.startswith("Rank 0 begins 50 ms later than predicted: see what it does before")


def test_ranks_that_are_all_late_share_the_gap():
    trace = foretold("dp2 pp2 m4")
    late = [replace(event, start_s=event.start_s + 0.05) for event in trace.events if event.kind != "step"]
    steps = [Event(rank, "step", 0.0, trace.step_time_s + 0.05, step=0) for rank in trace.ranks]
    found = compare.traces(trace, as_run(trace.with_events([*late, *steps])))
    check(found)
    assert [(cause.what, cause.rank) for cause in found.causes] == [("late start", None)]
    assert found.sentence.startswith("All ranks begin 50 ms later")


def test_a_long_collective():
    plain = predict.timeline(built("dp2 pp2 m4"), FORWARD_S, BACKWARD_S)
    found = compare.traces(with_end(plain, sum_s=0.03), as_run(with_end(plain, sum_s=0.09, update_s=0.012)))
    check(found)
    assert [(cause.what, cause.axis) for cause in found.causes] == [("collectives", "dp"), ("optimizer", None)]
    assert [cause.seconds for cause in found.causes] == pytest.approx([0.06, 0.002])
    (row,) = found.of("collectives")
    assert (row.axis, row.difference) == ("dp", pytest.approx(0.06))
    assert found.of("optimizer")[0].difference == pytest.approx(0.002)
    assert found.sentence.startswith("Collectives over dp take more time than predicted")
    assert {span.rank for span in found.causes[0].spans} == {0, 1, 2, 3}


def test_what_a_prediction_leaves_out_is_said():
    plain = predict.timeline(built("dp2 pp2 m4"), FORWARD_S, BACKWARD_S)
    found = compare.traces(plain, as_run(with_end(plain, sum_s=0.09)))
    check(found)
    assert found.of("collectives")[0].predicted is None
    assert found.sentence.startswith("Collectives over dp are only in the measured step, and that is 90 % of")
    assert "the optimizer is only in the measured step" in str(found)


def test_a_slow_rank_beside_ranks_with_the_same_work():
    trace = predict.timeline(built("dp4"), FORWARD_S, BACKWARD_S)
    slow = [replace(one, duration_s=0.06) if (one.rank, one.kind) == (2, "B") else one for one in trace.events]
    found = compare.traces(with_end(trace), as_run(with_end(trace.with_events(slow))))
    check(found)
    assert [(cause.what, cause.rank) for cause in found.causes] == [("compute", 2)]
    assert found.causes[0].seconds == pytest.approx(0.02)
    assert "Rank 2 is 33 % slower than predicted: other ranks with the same work are not" in found.sentence
    assert "the others wait there for rank 2" not in found.sentence


def test_long_messages():
    found = compare.traces(foretold("pp4 m8"), as_run(foretold("pp4 m8", send_s=0.01)))
    check(found)
    assert [cause.what for cause in found.causes] == ["messages"]
    assert found.sentence.startswith("Messages between stages take 9 ms more each than predicted")


def test_everything_slower_is_one_gap_and_cores_are_named_when_they_are_given():
    run = as_run(foretold("pp4 m8", 2.5 * FORWARD_S, 2.5 * BACKWARD_S))
    found = compare.traces(foretold("pp4 m8"), run, num_cores=2)
    check(found)
    assert (found.causes[0].what, found.causes[0].stage) == ("compute", None)
    assert found.sentence.startswith("Computation takes 2.5 times as long as predicted: 4 ranks share 2 cores")
    assert "core" not in compare.traces(foretold("pp4 m8"), run).sentence
    assert "core" not in compare.traces(foretold("pp4 m8"), run, num_cores=4).sentence


def test_a_slow_stage_on_a_slow_machine_counts_for_what_it_adds():
    durations = {name: [1.2 * each for each in values] for name, values in slower(3, 4, 1.5).items()}
    found = compare.traces(foretold("pp4 m8"), as_run(foretold("pp4 m8", **durations)))
    check(found)
    assert {(cause.what, cause.stage) for cause in found.causes} == {("compute", None), ("compute", 3)}
    assert all(cause.share > 0.2 for cause in found.causes)


def test_nested_collectives_count_apart_from_their_stage():
    def run(sum_s: float) -> Trace:
        events = []
        for rank in (0, 1):
            at_s = 0.0
            for kind, plain_s in (("F", FORWARD_S), ("B", BACKWARD_S)):
                events.append(Event(rank, kind, at_s, plain_s + sum_s, step=0, stage=0, microbatch=0))
                events.append(Event(rank, "all_reduce", at_s + 0.01, sum_s, step=0, group="tp"))
                at_s += plain_s + sum_s
        return Trace(events, "measured", built("tp2"))

    found = compare.traces(run(0.005), run(0.02))
    check(found)
    assert [(cause.what, cause.axis) for cause in found.causes] == [("collectives", "tp")]
    assert found.causes[0].seconds == pytest.approx(0.03)
    assert found.sentence.startswith("Collectives over tp take more time than in the first")


def test_a_backward_that_recomputes():
    text = "pp4 m8 recompute:full"
    durations = {"backward_s": [BACKWARD_S, BACKWARD_S + FORWARD_S, BACKWARD_S, BACKWARD_S]}
    found = compare.traces(foretold(text), as_run(foretold(text, **durations)))
    check(found)
    assert "its backward is longer by a forward, which recompute=full runs again" in found.sentence


def test_a_declared_pace():
    pace = Pace(forward_s=(0.02, 0.02, 0.02, 0.04), backward_s=(0.04, 0.04, 0.04, 0.08))
    run = as_run(foretold("pp4 m8", pace.forward_s, pace.backward_s), pace=pace)
    found = compare.traces(foretold("pp4 m8"), run)
    assert "Stage 3 takes 2 times as long as predicted: its pace was declared so" in found.sentence
    tight = replace(pace, forward_s=0.02, backward_s=0.04)
    sentence = compare.traces(foretold("pp4 m8"), as_run(run, pace=tight)).sentence
    assert "its work needs 100 % more than the pace declares" in sentence


def test_equal_steps_and_gaps_that_cancel():
    same = compare.traces(foretold("pp4 m8"), as_run(foretold("pp4 m8")))
    check(same)
    assert same.causes == ()
    assert same.sentence.startswith("The step takes as long as predicted (")
    plain = predict.timeline(built("dp2"), FORWARD_S, BACKWARD_S)
    slow = predict.timeline(built("dp2"), FORWARD_S, BACKWARD_S + 0.02)
    found = compare.traces(with_end(plain, sum_s=0.03), as_run(with_end(slow, sum_s=0.01)))
    assert sorted(cause.seconds for cause in found.causes) == pytest.approx([-0.02, 0.02])
    assert "but only because gaps cancel: " in found.sentence


def test_two_layouts_side_by_side_say_what_has_no_counterpart():
    found = compare.traces(foretold("pp4 m8"), foretold("dp2 pp2 m8"))
    check(found)
    assert found.names == ("first", "second")
    (row,) = [row for row in found.of("compute") if row.stage == 3]
    assert (row.measured, row.difference, row.ratio) == (None, None, None)
    assert "only first" in str(found)
    assert "Ranks wait less than in the first: it has dp=2 instead of 1, pp=2 instead of 4" in found.sentence
    found = compare.traces(foretold("pp4 m8"), foretold("pp4 m16"))
    check(found)
    assert "num_microbatches=16 instead of 8" in found.sentence


def test_predicted_steps_of_two_precisions():
    model, h100 = Model.preset("llama3-8b"), Hardware.preset("h100")
    one, two = (predict.step(built(f"dp4 pp4 interleaved v2 m8 {kind}", model), h100) for kind in ("bf16", "fp32"))
    found = compare.traces(one, two)
    check(found)
    assert found.step_time.predicted == one.step_time_s
    assert "precision=fp32 instead of bf16" in found.sentence


@pytest.mark.parametrize(
    "text", ["pp4 m8", "dp2 pp2 m4", "pp2 zbv v2 m4", "pp2 interleaved v2 m4", "dp2 tp2 m2", "pp4 gpipe m4"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_gaps_of_any_noise_add_up(text, seed):
    noise = random.Random(seed)
    stages = built(text).num_stages

    def noisy() -> Trace:
        durations = [[base * noise.uniform(0.8, 1.5) for _ in range(stages)] for base in (FORWARD_S, BACKWARD_S)]
        trace = predict.timeline(built(text), *durations, send_s=noise.uniform(0, 0.01))
        return with_end(trace, sum_s=noise.uniform(0, 0.05), update_s=noise.uniform(0.001, 0.02))

    found = compare.traces(noisy(), as_run(noisy()))
    check(found)
    assert found._repr_html_().startswith("<p><b>")
    assert show.compared(found).data


def test_the_step_of_median_length_is_compared_or_the_one_asked_for():
    events = []
    for step, factor in enumerate((5.0, 1.0, 1.1, 1.2, 0.9)):
        one = predict.timeline(built("pp2 m4"), factor * FORWARD_S, factor * BACKWARD_S)
        events += [replace(event, start_s=event.start_s + 10 * step, step=step) for event in one.events]
    run, predicted = (
        Trace(events, "measured", built("pp2 m4")),
        predict.timeline(built("pp2 m4"), FORWARD_S, BACKWARD_S),
    )
    assert compare.traces(predicted, run).measured.steps == [2]
    assert compare.traces(predicted, run).step_time.ratio == pytest.approx(1.1)
    assert compare.traces(predicted, run, step=3).step_time.ratio == pytest.approx(1.2)
    assert compare.traces(run, run, step=4).causes == ()
    with pytest.raises(PlanError, match="step=9 is not in measured, whose steps are 0 to 4: choose one of them"):
        compare.traces(predicted, run, step=9)


def test_clocks_that_are_not_aligned_compare_no_ranks():
    found = compare.traces(foretold("pp4 m8"), as_run(foretold("pp4 m8", **slower(3, 4, 2.0)), aligned=False))
    check(found)
    assert found.of("bubble")[0].measured is None
    assert all(row.measured is None for row in found.of("late start"))
    assert "clocks are not aligned" in str(found)
    assert found.sentence.startswith(
        "Ranks wait more than predicted: for stage 3, which takes 2 times as long; that is"
    )
    assert "clocks are not aligned" in show.compared(found).layout.title.text


def test_steps_with_little_in_them_are_compared_as_well():
    only_sums = [Event(rank, "all_reduce", 0.0, 0.5, step=0, group="dp", seq=0) for rank in (0, 1)]
    found = compare.traces(Trace(only_sums), Trace([replace(event, duration_s=0.7) for event in only_sums]))
    check(found)
    assert found.causes[0].axis == "dp"
    check(compare.traces(Trace([Event(0, "F", 0.0, 1.0)]), Trace([Event(0, "F", 0.0, 2.0)])))
    check(compare.traces(Trace([Event(0, "memory", 0.0, 0.0, num_bytes=3)]), Trace([Event(0, "F", 0.0, 0.0)])))


@pytest.mark.parametrize("wrong", [None, "trace", [], built("pp2")])
def test_what_is_no_trace_is_refused(wrong):
    with pytest.raises(PlanError, match=r"is no trace: what is compared is a Trace\. Give run\.trace"):
        compare.traces(foretold("pp2"), wrong)
    with pytest.raises(PlanError, match=r"predicted=.* is no trace"):
        compare.traces(wrong, foretold("pp2"))


def test_other_bad_input():
    with pytest.raises(PlanError, match="measured has 0 events: a comparison needs a step of each"):
        compare.traces(foretold("pp2"), Trace([]))
    with pytest.raises(PlanError, match="step='1' is a str"):
        compare.traces(foretold("pp2"), as_run(foretold("pp2")), step="1")
    with pytest.raises(PlanError, match="num_cores=0 is below 1"):
        compare.traces(foretold("pp2"), as_run(foretold("pp2")), num_cores=0)
    with pytest.raises(PlanError, match=r"is no comparison: give what lk\.compare\.traces"):
        show.compared(foretold("pp2"))


def test_the_picture_has_both_steps_and_names_the_gaps():
    found = compare.traces(foretold("pp4 m8"), as_run(foretold("pp4 m8", **slower(3, 4, 1.5))))
    figure = show.compared(found)
    pale, full = ([bar for bar in figure.data if bar.opacity == each] for each in (0.45, 1.0))
    assert (
        [bar.name for bar in pale] == [bar.name for bar in full] == ["forward", "backward", "optimizer", "all-reduce"]
    )
    (gap,) = [bar for bar in figure.data if bar.name == "takes longer"]
    assert set(gap.y) == {3}
    assert sum(gap.x) == pytest.approx(1e3 * 0.5 * 8 * (FORWARD_S + BACKWARD_S))
    texts = [note.text for note in figure.layout.annotations]
    assert any(text.startswith("stage 3 is 50 % slower · +") for text in texts)
    assert "it holds the output layer" in figure.layout.title.text
    assert all(math.isfinite(value) for bar in figure.data for value in bar.x)


def test_of_many_ranks_those_are_drawn_that_differ():
    trace = predict.timeline(built("dp64"), FORWARD_S, BACKWARD_S)
    slow = [replace(one, duration_s=0.06) if (one.rank, one.kind) == (40, "B") else one for one in trace.events]
    found = compare.traces(with_end(trace), as_run(with_end(trace.with_events(slow))))
    labels = show.compared(found).layout.yaxis.ticktext
    assert len(labels) == 16
    assert "rank 40" in labels
    assert len(str(found).splitlines()) < 20


def test_a_gap_in_a_step_without_length_is_drawn():
    brief = Trace([Event(0, "F", 0.0, 0.0, step=0, stage=0, microbatch=0)])
    gap = compare.Cause(what="messages", seconds=1.0, share=1.0, text="messages", spans=(compare.Span(0, 0.0, 0.0),))
    found = replace(compare.traces(brief, brief), causes=(gap,))
    assert any("messages" in note.text for note in show.compared(found).layout.annotations)


def test_a_small_difference_is_no_zero():
    said = compare.traces(foretold("pp1 m100"), foretold("pp1 m100", 1.004 * FORWARD_S, 1.004 * BACKWARD_S))
    assert said.causes[0].text == "computation is 0.4 % slower"
