"""What a training run keeps, records, agrees on and refuses, in real ranks without a notebook."""

import functools
import re
import tempfile

import pytest

from labkit.errors import LabError, PlanError
from labkit.plan import build
from labkit.spec import Layout, Model, Pace, Training
from tests.ranks import bare

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]  # one world runs all jobs in the first test

MODEL = Model(num_layers=4, d_model=32, num_heads=4, num_kv_heads=2, vocab_size=256, seq_len=16)
GPT = Model(
    num_layers=5,
    d_model=32,
    num_heads=4,
    vocab_size=256,
    seq_len=16,
    norm="layer",
    position="learned",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
)


def plan_of(text, model=MODEL):
    return build(model, Layout.parse(text))


def settings(num_steps, **options):
    return Training(num_steps=num_steps, **({"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.0} | options))


def run(text, num_steps, model=MODEL, **options):
    from labkit.rank import training

    return training.train(plan_of(text, model), settings(num_steps, **options))


def error_of(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return type(error), str(error)
    return None


def whole_weights():
    from labkit.rank import training

    return {name: tensor.double() for name, tensor in training.gather_weights().items()}


# Jobs: each runs in every rank of one world of four.


def clipping(text):
    """One step with clip_norm 0.01 and a learning rate of 1 moves the weights by 0.01."""
    run(text, 1, learning_rate=0.0)
    before = whole_weights()
    result = run(text, 1, learning_rate=1.0, clip_norm=0.01, start="live")
    after = whole_weights()
    moved = sum(float((after[name] - before[name]).square().sum()) for name in before) ** 0.5
    return moved, result["grad_norms"][0]


def going_on(text):
    once = run(text, 6, optimizer="adamw", learning_rate=1e-3)
    first = run(text, 2, optimizer="adamw", learning_rate=1e-3)
    rest = run(text, 4, optimizer="adamw", learning_rate=1e-3, start="live")
    return (once["losses"], once["grad_norms"]), (
        first["losses"] + rest["losses"],
        first["grad_norms"] + rest["grad_norms"],
    )


def refusals():
    run("dp4 b1", 1)
    found = {
        "layout": error_of(run, "dp2 pp2 m2", 1, start="live"),
        "model": error_of(run, "dp4 b1", 1, model=GPT, start="live"),
        "optimizer": error_of(run, "dp4 b1", 1, optimizer="adamw", start="live"),
        "data": error_of(run, "dp4 b1", 1, data="/nowhere/at/all", start="live"),
        "world": error_of(run, "dp8 b1", 1),
        "kept": len(run("dp4 b1", 2, start="live")["losses"]),
        "nan": error_of(run, "pp4 m4 b1", 20, learning_rate=1e30, clip_norm=None),
        "after": error_of(run, "pp4 m4 b1", 1, start="live"),
        "fresh": len(run("pp4 m4 b1", 2)["losses"]),
    }
    from labkit.rank import state

    state.end("a test said so")
    return found | {"ended": error_of(run, "pp4 m4 b1", 1, start="live")}


def recorded(text, model=MODEL, **options):
    """The rows of every step."""
    from labkit.rank import report

    steps = []
    report.install(lambda topic, message: steps.append(message["events"]) if topic == "events" else None)
    try:
        run(text, 2, model, **options)
    finally:
        report.install(None)
    return steps


def stopping():
    """Rank 2 alone is asked to stop, while step 1 ends."""
    import torch.distributed as dist

    from labkit.rank import report

    def ask(topic, message):
        if topic == "events" and message["events"][0][3] == 1 and dist.get_rank() == 2:
            report.request_stop()

    report.install(ask)
    try:
        result = run("dp2 pp2 m2", 50)
    finally:
        report.install(None)
    rest = run("dp2 pp2 m2", 1, start="live")
    return len(result["losses"]), result["stopped"], rest["stopped"]


def interrupting():
    """A signal that arrives in a step reaches the caller as what it is, and ends the state."""
    import signal

    from labkit.rank import report

    def ask(topic, message):
        if topic == "events" and message["events"][0][3] == 1:
            signal.raise_signal(signal.SIGINT)

    report.install(ask)
    try:
        run("dp4", 50)
    except KeyboardInterrupt:
        outcome = "interrupted"
    else:
        outcome = "not interrupted"
    finally:
        report.install(None)
    return outcome, error_of(run, "dp4", 1, start="live")


def many_runs():
    """Descriptors, threads and groups after two rounds of runs and after twelve."""
    import os
    import threading

    import torch.distributed as dist

    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(dist.distributed_c10d._world.pg_map)

    def one_round():
        for text in ("dp4", "tp2 pp2 m2", "dp2 tp2"):
            run(text, 1)

    one_round()
    one_round()
    before = held()
    for _ in range(6):
        one_round()
    return before, held()


def rebuilt_groups(folder):
    """Equal meshes over new groups that go by other names, as after an interrupt."""
    import torch.distributed as dist

    from labkit.rank import groups

    rank = dist.get_rank()
    before = [run(text, 2)["losses"] for text in ("tp2 dp2 b4", "tp2 pp2 m2 b4")]
    groups.tear_down()
    store = dist.FileStore(f"{folder}/again", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    refused = error_of(run, "tp2 pp2 m2 b4", 1, start="live")
    run("pp4 m1 b4", 1)  # its groups take the names that the others had
    after = [run(text, 2)["losses"] for text in ("tp2 pp2 m2 b4", "tp2 dp2 b4")]
    return before, after[::-1], refused


def all_jobs(folder):
    """Everything in one world: starting ranks costs more than the runs."""
    return {
        "fp32": run("dp1 b4", 4),
        "bf16": {text: run(f"{text} bf16", 4) for text in ("dp1 b4", "dp2 pp2 m2", "tp2 dp2 b2")},
        "again": [run("dp4", 3)["losses"], run("dp4", 3)["losses"], run("dp4", 3, seed=1)["losses"]],
        "gpt": [run(text, 3, GPT) for text in ("dp1 b4", "tp2 pp2 m2 b2", "dp2 tp2 b2", "pp4 m2 b2")],
        "clipping": {text: clipping(text) for text in ("dp4", "tp2 pp2 m2 b2", "dp2 tp2 b2")},
        "going_on": {text: going_on(text) for text in ("dp2 pp2 m2", "tp2 dp2 b2")},
        "refusals": refusals(),
        "pipeline": {text: recorded(text, optimizer="adamw") for text in ("pp3 m4", "pp3 gpipe m4", "pp3 m2")},
        "tensor": recorded("dp2 tp2 m2"),
        "data": recorded("dp4 m2"),
        "silent": recorded("dp4", trace=False),
        "paced": recorded("dp2 pp2 m2", pace=Pace(forward_s=0.02, backward_s=0.04)),
        "stopping": stopping(),
        "many_runs": many_runs(),
        "interrupting": interrupting(),
        "rebuilt": rebuilt_groups(folder),
    }


@functools.cache
def world():
    with tempfile.TemporaryDirectory() as folder:
        return bare.run(all_jobs, 4, folder)


def of(job, rank=0):
    return world()[rank][job]


def relative(values, references):
    return max(abs(a - b) / abs(b) for a, b in zip(values, references, strict=True))


@pytest.mark.parametrize("text", ["dp1 b4", "dp2 pp2 m2", "tp2 dp2 b2"])
def test_bf16_stays_close_to_fp32_and_is_not_it(text):
    result = of("bf16")[text]
    assert 0 < relative(result["losses"], of("fp32")["losses"]) < 2e-2
    assert 0 < relative(result["grad_norms"], of("fp32")["grad_norms"]) < 1e-1


def test_seeds():
    first, again, other = of("again")
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_gpt_with_biases_and_tied_embeddings_is_the_same_under_every_layout():
    for rank in range(4):
        for result in of("gpt", rank)[1:]:
            assert relative(result["losses"], of("gpt")[0]["losses"]) <= 1e-5
            assert relative(result["grad_norms"], of("gpt")[0]["grad_norms"]) <= 1e-4


@pytest.mark.parametrize("text", ["dp4", "tp2 pp2 m2 b2", "dp2 tp2 b2"])
def test_clipping_bounds_the_global_norm(text):
    moved, norm = of("clipping")[text]
    assert norm > 0.1
    assert moved == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("text", ["dp2 pp2 m2", "tp2 dp2 b2"])
def test_a_live_start_continues_exactly_as_one_longer_run(text):
    once, parts = of("going_on")[text]
    assert once == parts


def test_results_say_how_much_was_trained():
    result = of("fp32")
    assert result.keys() == {"losses", "grad_norms", "step_s", "tokens_per_step", "stopped", "device", "fp8_library"}
    assert result["tokens_per_step"] == 4 * 16
    assert len(result["step_s"]) == 4
    assert (result["stopped"], result["fp8_library"]) == (False, None)
    assert of("fp32", rank=3) is None


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("layout", "the live training state has layout 'dp4', not 'dp2 pp2 1f1b m2'"),
        ("model", "another model"),
        ("optimizer", "optimizer='sgd', not 'adamw'"),
        ("data", "does not exist"),
        ("world", "dp(8) * pp(1) * tp(1) = 8 but 4 ranks are up"),
        ("after", "no live training state: step "),
        ("ended", "no live training state: a test said so"),
    ],
)
def test_what_cannot_start_says_why_on_every_rank(what, words):
    for rank in range(4):
        kind, text = of("refusals", rank)[what]
        assert kind is PlanError
        assert words in text


def test_a_refused_start_leaves_the_state_alone():
    assert of("refusals")["kept"] == 2


def test_a_loss_that_is_no_number_names_step_and_rank_everywhere():
    texts = {of("refusals", rank)["nan"] for rank in range(4)}
    assert len(texts) == 1
    kind, text = texts.pop()
    assert kind is LabError
    assert re.match(r"loss is (nan|inf) at step \d+ on rank 3: .*learning_rate=1e\+30", text)
    assert of("refusals")["fresh"] == 2


@pytest.mark.parametrize("text", ["pp3 m4", "pp3 gpipe m4", "pp3 m2"])
def test_ranks_do_what_the_plan_says_in_its_order(text):
    for rank, actions in enumerate(plan_of(text).actions):
        for rows in of("pipeline", rank)[text]:
            done = [(row[4], row[0], row[5]) for row in rows if row[0] in ("F", "B")]
            assert done == [(action.stage, str(action.kind), action.microbatch) for action in actions]


@pytest.mark.parametrize("text", ["pp3 m4", "pp3 gpipe m4", "pp3 m2"])
@pytest.mark.parametrize(("send", "receive", "step"), [("SEND_F", "RECV_F", 1), ("SEND_B", "RECV_B", -1)])
def test_what_one_stage_sends_the_next_receives(text, send, receive, step):
    size = 16 * 32 * 4
    for rank in range(3):
        for index in range(2):
            sent = [row for row in of("pipeline", rank)[text][index] if row[0] == send]
            if not 0 <= rank + step < 3:
                assert sent == []
                continue
            got = [row for row in of("pipeline", rank + step)[text][index] if row[0] == receive]
            assert [row[5] for row in sent] == [row[5] for row in got] == list(range(len(got)))
            assert {(row[6], row[7], row[8], row[9]) for row in sent} == {("pp", None, size, rank + step)}
            assert {(row[6], row[7], row[8], row[9]) for row in got} == {("pp", None, size, rank)}


def test_gradients_are_reduced_once_a_step_and_every_byte_of_them():
    for rank in range(4):
        for rows in of("data", rank):
            reduced = [row for row in rows if row[0] == "all_reduce" and row[6] == "dp"]
            assert sum(row[8] for row in reduced) == 4 * MODEL.num_parameters
        seqs = [row[7] for rows in of("data", rank) for row in rows if row[6] == "dp"]
        assert seqs == list(range(len(seqs)))


def test_tensor_parallel_collectives_are_recorded_with_their_bytes():
    plan = plan_of("dp2 tp2 m2")
    stream, per_token = 16 * 32 * 4, 16 * 4
    for rank in range(4):
        for rows in of("tensor", rank):
            for microbatch in range(2):
                found = [(row[0], row[8]) for row in rows if row[6] == "tp" and row[5] == microbatch]
                # Forward: embedding, and twice a layer; backward: twice a layer, and the head's input.
                assert found.count(("all_reduce", stream)) == 1 + 2 * 4 + 2 * 4 + 1
                # The loss: three numbers of each token, and no logits.
                assert found.count(("all_reduce", per_token)) == len(found) - 18 == 3
            reduced = [row[8] for row in rows if row[0] == "all_reduce" and row[6] == "dp"]
            assert reduced == [4 * plan.num_parameters(rank)]


def test_every_step_has_its_end_its_update_its_agreement_and_memory():
    for rank in range(4):
        for index, rows in enumerate(of("data", rank)):
            kinds = [row[0] for row in rows]
            assert {row[3] for row in rows} == {index}
            assert kinds[-1] == "step"
            assert kinds.count("optimizer") == kinds.count("step") == 1
            assert [row[8] for row in rows if row[6] == "world"] == [24]
            assert all(row[8] > 1 << 20 for row in rows if row[0] == "memory")
            assert kinds.count("memory") == 2 * 2 + 1
            start_s, duration_s = rows[-1][1:3]
            assert all(start_s <= row[1] and row[1] + row[2] <= start_s + duration_s + 1e-6 for row in rows)


def test_without_tracing_nothing_is_recorded():
    assert of("silent") == []


def test_a_paced_action_lasts_at_least_as_declared():
    for rank in range(4):
        for rows in of("paced", rank):
            assert min(row[2] for row in rows if row[0] == "F") >= 0.02
            assert min(row[2] for row in rows if row[0] == "B") >= 0.04


def test_one_rank_that_is_asked_to_stop_stops_all_after_the_same_step():
    assert [of("stopping", rank) for rank in range(4)] == [(3, True, False)] * 4


def test_an_interrupt_passes_through_and_ends_the_state():
    for rank in range(4):
        outcome, (kind, text) = of("interrupting", rank)
        assert outcome == "interrupted"
        assert kind is PlanError
        assert "KeyboardInterrupt" in text


def test_many_runs_hold_no_more_than_two():
    for rank in range(4):
        before, after = of("many_runs", rank)
        assert after == before


def test_groups_that_were_built_anew_are_used_and_the_old_state_is_not():
    for rank in range(4):
        before, after, (kind, text) = of("rebuilt", rank)
        assert before == after
        assert kind is PlanError
        assert "built anew" in text
