"""Several stages per rank, in real ranks: what they do, what they send, and that they train as one rank does."""

import functools

import pytest

from labkit.plan import build
from labkit.spec import Layout, Model, Pace, Training
from tests.ranks import bare

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]  # one world runs all jobs in the first test

# Tied: a V has both copies of the matrix on its first rank, the others on two.
MODEL = Model(num_layers=8, d_model=16, num_heads=2, vocab_size=256, seq_len=16, tied_embeddings=True)
LAYOUTS = (
    "pp4 interleaved v2 m4 b3",
    "pp4 looped_bfs v2 m3 b4",
    "pp4 interleaved_zero_bubble v2 m4 b3",
    "pp4 zbv v2 m4 b3",
    "pp4 dualpipe_v v2 m12 b1",
    "pp2 interleaved v4 m2 b6",
    "tp2 pp2 zbv v2 m2 b6",
    "dp2 pp2 zero3 zbv v2 m2 b3",
    "dp2 pp2 interleaved v2 m2 b3",
)
RECORDED = ("pp4 interleaved v2 m4", "dp2 pp2 zbv v2 m2", "pp2 dualpipe_v v2 m4", "pp4 looped_bfs v2 m2")
# The last stage takes its micro-batches in another order than the first, and stages lie as no layout lays them.
OWN = """
1F0 1F1 3F1 3B1 3F0 3I0 1B1 3W0 1B0
0F0 0F1 2F0 2F1 2B1 0B1 2B0 0B0
"""
SHARDED = "dp2 pp2 zero3 zbv v2 m2 b3"
UNDISTURBED = "dp2 pp2 zero3 no_reshard zbv v2 m2 b3"
MESSAGE_BYTES = 16 * 16 * 4


def settings(num_steps=3, **options):
    return Training(num_steps=num_steps, optimizer="sgd", learning_rate=0.1, weight_decay=0.0, **options)


def plan_of(text, own=None):
    return build(MODEL, Layout.parse(text), schedule=own)


def train(text, own=None, **options):
    from labkit.rank import training

    result = training.train(plan_of(text, own), settings(**options))
    if result is None:
        return None
    return {
        "losses": result["losses"],
        "grad_norms": result["grad_norms"],
        "weights": {name: tensor.numpy() for name, tensor in training.gather_weights().items()},
    }


def recorded(text, own=None, **options):
    """The rows of one step."""
    from labkit.rank import report

    steps = []
    report.install(lambda topic, message: steps.append(message["events"]) if topic == "events" else None)
    try:
        train(text, own, num_steps=1, **options)
    finally:
        report.install(None)
    return steps[0] if steps else []


def train_as_torch_does(text):
    """Without what `Stage` adds to torch's half backwards."""
    from labkit.rank.pipeline_parallel import Stage

    added = Stage.backward_maybe_with_nosync
    del Stage.backward_maybe_with_nosync
    try:
        return train(text)
    finally:
        Stage.backward_maybe_with_nosync = added


def all_jobs():
    return {
        "trained": {text: train(text) for text in ("dp1 b12", *LAYOUTS)} | {"own": train("pp2 v2 m2 b6", OWN)},
        "as torch": {text: train_as_torch_does(text) for text in (SHARDED, UNDISTURBED)},
        "recorded": {text: recorded(text) for text in RECORDED} | {"own": recorded("pp2 v2 m2", OWN)},
        "paced": recorded("pp2 zbv v2 m2", pace=Pace(forward_s=0.02, backward_s=0.04)),
    }


@functools.cache
def world():
    return bare.run(all_jobs, 4)


def of(job, rank=0):
    return world()[rank][job]


def relative(values, references):
    return max(abs(a - b) / abs(b) for a, b in zip(values, references, strict=True))


@pytest.mark.parametrize("text", [*LAYOUTS, "own"])
def test_several_stages_per_rank_train_as_one_rank_does(text):
    one = of("trained")["dp1 b12"]
    for rank in range(2 if text == "own" or text.startswith("pp2") else 4):
        result = of("trained", rank)[text]
        assert relative(result["losses"], one["losses"]) <= 1e-5
        assert relative(result["grad_norms"], one["grad_norms"]) <= 1e-4
        assert result["weights"].keys() == one["weights"].keys()
        assert all(abs(result["weights"][name] - one["weights"][name]).max() <= 1e-5 for name in one["weights"])


def test_torch_alone_leaves_out_gradients_of_half_backwards_whose_weights_were_dropped():
    """When this fails, torch mended it, and `Stage.backward_maybe_with_nosync` can go."""
    one = of("trained")["dp1 b12"]
    assert relative(of("as torch")[UNDISTURBED]["grad_norms"], one["grad_norms"]) <= 1e-4
    assert relative(of("as torch")[SHARDED]["losses"][:1], one["losses"][:1]) <= 1e-5
    assert of("as torch")[SHARDED]["grad_norms"][0] < 0.9 * one["grad_norms"][0]


@pytest.mark.parametrize("text", [*RECORDED, "own"])
def test_ranks_do_what_the_plan_says_in_its_order(text):
    plan = plan_of("pp2 v2 m2", OWN) if text == "own" else plan_of(text)
    for rank in range(plan.world_size):
        rows = of("recorded", rank)[text]
        done = [(row[4], row[0], row[5]) for row in rows if row[0] in ("F", "B", "I", "W")]
        wanted = plan.actions[plan.placement(rank).pp_rank]
        assert done == [(action.stage, action.kind, action.microbatch) for action in wanted]


@pytest.mark.parametrize("text", [*RECORDED, "own"])
@pytest.mark.parametrize(("send", "receive", "step"), [("SEND_F", "RECV_F", 1), ("SEND_B", "RECV_B", -1)])
def test_what_one_stage_sends_the_next_receives_unless_one_rank_holds_both(text, send, receive, step):
    plan = plan_of("pp2 v2 m2", OWN) if text == "own" else plan_of(text)
    rows = {rank: of("recorded", rank)[text] for rank in range(plan.world_size)}
    for rank in range(plan.world_size):
        pipeline = plan.group_ranks("pp", rank)
        for stage in plan.stages(rank):
            sent = sorted(row[5] for row in rows[rank] if row[0] == send and row[4] == stage)
            other = stage + step
            if not 0 <= other < plan.num_stages or other in plan.stages(rank):
                assert sent == []
                continue
            peer = pipeline[plan.pp_rank_of(other)]
            got = [row for row in rows[peer] if row[0] == receive and row[4] == other]
            assert sent == sorted(row[5] for row in got) == list(range(plan.layout.num_microbatches))
            assert {(row[6], row[8], row[9]) for row in got} == {("pp", MESSAGE_BYTES, rank)}


def test_gradients_of_each_stage_are_added_up_once_and_every_byte_of_them():
    text = "dp2 pp2 zbv v2 m2"
    plan = plan_of(text)
    for rank in range(4):
        reduced = [row for row in of("recorded", rank)[text] if row[0] == "all_reduce" and row[6] == "dp"]
        assert sorted(row[4] for row in reduced) == plan.stages(rank)
        assert sum(row[8] for row in reduced) == 4 * plan.num_parameters(rank)


def test_what_belongs_to_no_stage_says_so():
    rows = of("recorded")["dp2 pp2 zbv v2 m2"]
    assert {row[4] for row in rows if row[0] in ("step", "optimizer", "memory")} == {None}


def test_a_pace_holds_each_half_of_a_backward_to_half_of_it():
    for rank in range(2):
        rows = of("paced", rank)
        assert min(row[2] for row in rows if row[0] == "F") >= 0.02
        assert min(row[2] for row in rows if row[0] in ("I", "W")) >= 0.02
