"""Arithmetic of many hosts: who talks across them, how much, and what that costs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import predict, show
from labkit.errors import PlanError
from labkit.plan import build
from labkit.spec import Hardware, Layout, Model

H100 = Hardware.preset("h100")
LARGE = Model.preset("llama3-70b")
degrees = st.sampled_from([1, 2, 4])


def large(text):
    return build(LARGE, Layout.parse(text))


@given(degrees, degrees, degrees, st.integers(1, 9))
def test_groups_reach_as_many_hosts_as_their_ranks_live_on(dp, tp, pp, ranks_per_host):
    plan = build(LARGE, Layout(dp=dp, tp=tp, pp=pp))
    for axis in ("dp", "tp", "pp"):
        hosts = [len({rank // ranks_per_host for rank in group}) for group in plan.groups(axis)]
        assert predict.num_hosts(plan, axis, ranks_per_host) == max(hosts)


def test_another_order_lets_another_axis_cross():
    plan = large("dp4 tp8 pp2 m8")
    assert [predict.num_hosts(plan, axis, 8) for axis in ("tp", "dp", "pp")] == [1, 4, 2]
    assert predict.num_hosts(plan, "tp", 8, ("dp", "pp", "tp")) == 8
    with pytest.raises(PlanError, match="each of tp, dp and pp comes once"):
        predict.num_hosts(plan, "tp", 8, ("dp", "tp"))


def test_ring_time_is_latency_that_grows_and_bytes_that_saturate():
    latency = [predict.ring_time(0, n, alpha_s=1.0, bytes_per_s=1.0) for n in (1, 2, 8, 1024)]
    assert latency == [0, 2, 14, 2046]
    volume = [predict.ring_time(1.0, n, alpha_s=0.0, bytes_per_s=1.0) for n in (2, 4, 1024)]
    assert volume == pytest.approx([1.0, 1.5, 2 * 1023 / 1024])


def test_tensor_parallelism_stays_within_a_host_or_costs_most_of_a_step():
    near = predict.shares(large("dp64 tp8 pp2 m16 bf16"), H100)
    far = predict.shares(large("dp64 tp8 pp2 m16 bf16"), H100, order=("dp", "tp", "pp"))
    deep = predict.shares(large("dp64 pp16 m16 bf16"), H100)
    assert near.compute_s == far.compute_s == deep.compute_s
    assert far.tp_s > 3 * near.tp_s
    assert near.step_s < deep.step_s < far.step_s
    assert deep.bubble_s == pytest.approx(deep.compute_s * 15 / 16)
    assert near.step_s == near.compute_s + near.bubble_s + near.tp_s + near.pp_s + near.dp_s


def test_ranks_of_a_group_use_the_ports_of_their_host_together():
    copies, spread = predict.shares(large("dp64 m16"), H100), predict.shares(large("dp64 tp8 m16"), H100)
    slow = predict.shares(large("dp64 m16"), replace(H100, ranks_per_host=1))
    assert slow.dp_s == pytest.approx(8 * copies.dp_s, rel=0.01)  # one port instead of eight
    assert spread.dp_s == pytest.approx(copies.dp_s, rel=0.01)  # an eighth of the bytes, through one port


def test_what_is_not_counted_is_refused():
    with pytest.raises(PlanError, match="traffic counts layouts without zero, sp and recompute:full"):
        predict.traffic(large("dp2 zero3"))
    with pytest.raises(PlanError, match=r"schedule='zbv' in 'pp2 zbv v2 m4': .* Use 1f1b\."):
        predict.shares(large("pp2 zbv v2 m4"), H100)


def test_a_picture_of_hosts_has_every_rank_on_every_axis():
    figure = show.hosts(large("dp2 tp4 pp2"), 4)
    assert [len(panel.x) for panel in figure.data] == [16, 16, 16]
    titles = [note.text for note in figure.layout.annotations]
    assert titles == [
        "<b>tensor parallel 4</b> · within a host",
        "<b>data parallel 2</b> · <b>across 2 hosts</b>",
        "<b>pipeline 2</b> · <b>across 2 hosts</b>",
    ]
    assert "computed, not measured" in figure.layout.title.text
    tp, dp, _ = figure.data
    assert len(set(tp.marker.color[:4])) == 1
    outlined = [int(text) for text, width in zip(dp.text, dp.marker.line.width, strict=True) if width]
    assert outlined == [0, 4]
    assert "talks over dp to ranks 0, 4" in dp.hovertext[list(dp.text).index("4")]
    assert show.hosts(large("dp4"), 8).layout.annotations[0].text.endswith("not used")
    with pytest.raises(PlanError, match="512 ranks are more than 256"):
        show.hosts(large("dp512"), 8)
    with pytest.raises(PlanError, match="is no Plan"):
        show.hosts("dp4", 8)


def test_pictures_of_shares_and_rings_say_what_they_are():
    rows = {text: predict.shares(large(text), H100) for text in ("tp8 pp2 m16 bf16", "pp16 m16 bf16")}
    figure = show.shares(rows, title="70B", notes="assumed speeds")
    assert "simulated · assumed speeds" in figure.layout.title.text
    assert sum(bar.x[0] for bar in figure.data) == pytest.approx(rows["tp8 pp2 m16 bf16"].step_s)
    assert figure.layout.annotations[0].text.startswith("<b>")
    with pytest.raises(PlanError, match="no shares to draw"):
        show.shares({"a": 1.0}, title="", notes="")
    ring = show.ring(measured={2: 1.0, 4: 1.5})
    assert {curve.name for curve in ring.data} >= {"ring, counted on ranks", "tree: 2 log₂ N"}
    assert max(ring.data[0].y) < 2
    with pytest.raises(PlanError, match="most_ranks=2 shows no trend"):
        show.ring(2)
