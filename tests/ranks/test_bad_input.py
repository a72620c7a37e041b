"""What goes wrong through the public face ends in one clear error, and the same ranks train right afterwards."""

import re
from typing import Any

import pytest

import labkit as lk
from labkit.errors import PlanError, RankError
from labkit.plan import Plan
from labkit.schedule import parse_actions
from labkit.spec import Layout, Model

pytestmark = pytest.mark.ranks

MODEL = Model(num_layers=4, d_model=32, num_heads=4, vocab_size=256, seq_len=16)


def plan_of(text: str) -> Plan:
    return lk.plan.build(MODEL, Layout.parse(text))


def train(ranks: Any, plan: Any, num_steps: int = 2, **options: Any) -> Any:
    return lk.launch.train(ranks, plan, num_steps, **{"progress": False, "trace": False, **options})


def spoil(rank: int, value: float) -> None:
    """Runs on a rank: one element of one of its weights is no number any more."""
    import torch.distributed as dist

    from labkit.rank import state

    if dist.get_rank() == rank:
        tensors = state.current().weights.tensors
        tensors[min(name for name in tensors if "feed_forward.up" in name)].detach().view(-1)[0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("text", "rank", "where"),
    [
        ("dp4", 2, "rank 2"),
        ("tp2 pp2 m2 b2", 0, "ranks 2 and 3"),  # the last stage's, which compute the loss
        ("dp2 tp2 zero3 sp m2", 3, "ranks 0, 1, 2 and 3"),
        ("dp2 pp2 zbv v2 m2", 0, "rank 0"),
    ],
)
def test_weights_that_are_no_numbers_are_named_by_step_and_rank(
    ranks: Any, text: str, rank: int, where: str, value: float
) -> None:
    plan = plan_of(text)
    before = train(ranks, plan).losses
    ranks.run(spoil, rank, value)
    with pytest.raises(RankError, match=rf"loss is (nan|inf) at step 2 on {where}: ") as caught:
        train(ranks, plan, start="live")
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert len({str(failure) for failure in caught.value.failures.values()}) == 1
    assert train(ranks, plan).losses == before


def test_an_infinite_weight_is_named_where_fp8_would_saturate_it(ranks: Any) -> None:
    plan = plan_of("dp4 fp8")
    before = train(ranks, plan).losses
    ranks.run(spoil, 1, float("inf"))
    with pytest.raises(RankError, match=r"magnitude of the weight of layers\.0\.feed_forward\.up.* is inf") as caught:
        train(ranks, plan, start="live")
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert train(ranks, plan).losses == before


@pytest.mark.parametrize("text", ["tp4 b2", "pp4 gpipe m4", "dp4 zero1", "dp4 zero3"])
def test_a_learning_rate_that_is_far_too_large(ranks: Any, text: str) -> None:
    plan = plan_of(text)
    before = train(ranks, plan).losses
    with pytest.raises(
        RankError, match=r"(loss|gradient norm) is (nan|inf) at step \d+.*learning_rate=1e\+30"
    ) as caught:
        train(ranks, plan, 20, optimizer="sgd", learning_rate=1e30, clip_norm=None)
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert train(ranks, plan).losses == before


def test_text_that_is_none(ranks: Any, tmp_path: Any) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "other").write_bytes(bytes(range(256)) * 10)
    plan = plan_of("dp2 tp2")
    with pytest.raises(RankError, match=r"3 bytes"):
        train(ranks, plan, data=str(tmp_path / "short"))
    few = lk.plan.build(Model(num_layers=1, d_model=32, num_heads=4, vocab_size=100, seq_len=16), plan.layout)
    with pytest.raises(RankError, match=r"has the byte 255 but vocab_size=100"):
        train(ranks, few, data=str(tmp_path / "other"))
    with pytest.raises(PlanError, match=r"no usable path"):
        train(ranks, plan, data=str(tmp_path / "none"))
    assert len(train(ranks, plan).losses) == 2


DEADLOCK = "0F0 0B0\n1B0 1F0"


def test_a_schedule_that_waits_for_ever_never_reaches_ranks(ranks: Any) -> None:
    layout = Layout.parse("pp2 m1")
    with pytest.raises(PlanError, match=r"rank 1 waits at 1B0 for 1F0: no rank can go on"):
        lk.plan.build(MODEL, layout, schedule=DEADLOCK)
    lines = tuple(tuple(line) for line in parse_actions(DEADLOCK))
    by_hand = Plan(model=MODEL, layout=Layout.parse("pp2 own m1"), schedule=lines)
    for call in (lambda: train(ranks, by_hand), lambda: lk.launch.parity(ranks, MODEL, [by_hand], progress=False)):
        with pytest.raises(PlanError, match=r"rank 1 waits at 1B0 for 1F0: no rank can go on"):
            call()
    assert len(train(ranks, plan_of("pp2 m1")).losses) == 2


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=3), r"num_heads=4 is not divisible by tp=3"),
        (Layout(pp=4, schedule="interleaved", num_virtual_stages=2), r"num_layers=4 is fewer than pp=4 \* .* 8 stages"),
        (Layout(dp=4, zero_stage=3), r"the plan of 'dp4 zero3' is not what lk\.plan\.build makes of it"),
    ],
)
def test_a_plan_made_by_hand_is_checked_before_ranks_see_it(ranks: Any, layout: Layout, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        train(ranks, Plan(model=MODEL, layout=layout))


@pytest.mark.parametrize("text", ["pp4", "tp2", "pp2 zbv v2", "tp2 sp"])
def test_a_model_too_small_to_split(ranks: Any, text: str) -> None:
    smallest = Model(num_layers=1, d_model=2, num_heads=1, vocab_size=3, seq_len=1, d_ff=1)
    for call in (
        lambda: lk.plan.build(smallest, Layout.parse(text)),
        lambda: lk.launch.parity(ranks, smallest, [text], progress=False),
    ):
        with pytest.raises(PlanError, match=re.compile(r": .*Use ")):
            call()
