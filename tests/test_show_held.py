"""Pictures of predicted memory: bars that add up, ranks that fold, a device's limit."""

from dataclasses import replace

import pytest

from labkit import plan as planning
from labkit import predict, show
from labkit.errors import PlanError
from labkit.spec import Hardware, Layout, Model


def memories(text, model="tiny"):
    return predict.memory(planning.build(Model.preset(model), Layout.parse(text)))


def sums(figure):
    """The bars' lengths by name."""
    found = {}
    for bar in figure.data:
        if bar.type == "bar":
            for name, amount in zip(bar.y, bar.x, strict=True):
                found[name] = found.get(name, 0) + amount
    return found


def test_equal_ranks_share_a_bar_that_is_as_long_as_their_peak():
    found = memories("dp2 pp2 m4")
    lengths = sums(show.memory(found))
    assert lengths == pytest.approx({"ranks 0, 1": found[0].peak / 2**20, "ranks 2, 3": found[2].peak / 2**20})
    assert list(sums(show.memory(list(found)))) == list(lengths)


def test_what_measured_peaks_have_beyond_their_categories_is_a_part_of_its_own():
    found = memories("dp4")
    measured = [replace(one, peak=one.peak + 2**20) for one in found]
    figure = show.memory(found, measured=measured)
    rest = next(bar for bar in figure.data if bar.name == "not accounted for")
    assert list(rest.x) == [0.0, 1.0]
    assert list(sums(figure)) == ["ranks 0-3", "ranks 0-3, measured"]
    with pytest.raises(PlanError, match="rank 0 was predicted and not measured"):
        show.memory(found, measured=[])


def test_a_device_s_memory_is_a_line_and_what_would_fit_is_said():
    h100 = Hardware.preset("h100")
    figure = show.memory(memories("dp4 tp2 bf16", "llama2-7b"), hardware=h100)
    assert figure.layout.shapes[0].x0 == pytest.approx(80e9 / 2**30)
    assert "'dp4 tp2 zero1 bf16' would fit" in figure.to_json()
    assert "to spare" in show.memory(memories("dp4"), hardware=h100).to_json()
    huge = show.memory(memories("dp8 bf16", "llama3-405b"), hardware=h100)
    assert "Use more ranks or a smaller model" in huge.to_json()


def test_thousands_of_ranks_fold_into_their_places():
    figure = show.memory(memories("dp128 tp8 pp16 zero1 m16 bf16 sp", "llama3-405b"))
    assert len(figure.data[0].y) == 16
    assert figure.data[0].y[1] == "ranks 1024-2047"


def test_nothing_is_refused():
    with pytest.raises(PlanError, match="no rank to draw"):
        show.memory([])


def test_a_measured_rank_within_a_fold_counts():
    found = memories("dp32 pp4 m4")
    measured = [replace(one, peak=one.peak + (2**20 if one.rank == 5 else 0)) for one in found]
    rest = next(bar for bar in show.memory(found, measured=measured).data if bar.name == "not accounted for")
    assert list(rest.x) == [0.0, 1.0, *[0.0] * 6]


def test_what_does_not_belong_to_bars_or_to_a_trace_is_refused():
    found = memories("dp2")
    trace = predict.step(found.plan, Hardware.preset("h100"))
    for given, options, message in (
        (found, {"measured": 5}, "measured=5 is no list of Memory"),
        (found, {"measured": ["rank 0"]}, "is no list of Memory"),
        (found, {"hardware": "h100"}, "hardware='h100' is no Hardware: use .*preset"),
        (found, {"step": 0}, "step=0 beside predicted memory"),
        (trace, {"hardware": Hardware.preset("h100")}, "beside a trace: .* Give what lk.predict.memory"),
        (trace, {"measured": list(found)}, "beside a trace"),
    ):
        with pytest.raises(PlanError, match=message):
            show.memory(given, **options)
