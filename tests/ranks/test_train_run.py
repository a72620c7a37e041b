"""`launch.train` on real ranks: what a run keeps, how it is stopped, how it fails."""

import os
import signal
import threading
import time

import pytest

import labkit as lk
from labkit.errors import ClusterError, LabError, PlanError, RankError, RankLost, RankTimeout
from labkit.trace import Trace

pytestmark = pytest.mark.ranks

LIMIT_S = 60.0
LONG = 100_000


def plan_of(text, **fields):
    sizes = {"num_layers": 4, "d_model": 32, "num_heads": 4, "vocab_size": 256, "seq_len": 16}
    return lk.plan.build(lk.spec.Model(**{**sizes, **fields}), lk.spec.Layout.parse(text))


def background(ranks, text="dp4", **options):
    return lk.launch.train(ranks, plan_of(text), **{"num_steps": LONG, "block": False, **options})


def until(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def reach_step(run, step):
    until(lambda: len(run.losses) >= step or run.state != "running", f"step {step} of {run}")
    assert run.state == "running", run.error


def all_reduce_ones():
    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("text", ["dp4", "tp4", "pp4 1f1b m4", "pp2 dp2 gpipe m2", "dp2 tp2 bf16"])
def test_a_run_and_its_trace(ranks, text):
    plan = plan_of(text)
    run = lk.launch.train(ranks, plan, 4, progress=False)
    assert run.state == "done"
    assert len(run.losses) == len(run.grad_norms) == len(run.step_s) == 4
    assert 4.0 < run.losses[0] < 7.0
    trace = run.trace
    assert (trace.origin, trace.aligned, trace.plan) == ("measured", True, plan)
    assert trace.steps == [0, 1, 2, 3]
    assert trace.ranks == [0, 1, 2, 3]
    assert all(value > 0 for value in trace.peak_bytes_by_rank.values())
    for rank in trace.ranks:
        of_rank = [event for event in trace.of_step(1).of_rank(rank).events if event.kind in ("F", "B")]
        wanted = plan.actions[plan.placement(rank).pp_rank]
        assert [(e.kind, e.stage, e.microbatch) for e in of_rank] == [(a.kind, a.stage, a.microbatch) for a in wanted]
    assert Trace.from_jsonl(trace.to_jsonl()) == trace


def test_on_the_common_clock_a_receive_ends_after_its_send_began(ranks):
    run = lk.launch.train(ranks, plan_of("pp4 1f1b m4"), 3, progress=False)
    sent = {(e.step, e.stage, e.microbatch): e for e in run.trace.events if e.kind == "F"}
    followed = 0
    for (step, stage, microbatch), event in sent.items():
        if (following := sent.get((step, stage + 1, microbatch))) is not None:
            assert following.end_s > event.end_s
            followed += 1
    assert followed == 3 * 3 * 4


def test_a_paced_run_lasts_as_declared_and_says_so(ranks):
    pace = lk.spec.Pace(forward_s=0.02, backward_s=0.04)
    run = lk.launch.train(ranks, plan_of("pp2 1f1b m2"), 2, pace=pace, progress=False)
    assert run.trace.pace == pace
    assert min(e.duration_s for e in run.trace.events if e.kind == "F") >= 0.0199
    assert min(e.duration_s for e in run.trace.events if e.kind == "B") >= 0.0399


def test_a_pace_of_each_stage_is_kept_by_each(ranks):
    pace = lk.spec.Pace(forward_s=(0.01, 0.03), backward_s=(0.02, 0.06))
    trace = lk.launch.train(ranks, plan_of("pp2 1f1b m2"), 1, pace=pace, progress=False).trace
    assert min(e.duration_s for e in trace.events if (e.kind, e.stage) == ("F", 1)) >= 0.0299
    assert min(e.duration_s for e in trace.events if (e.kind, e.stage) == ("B", 1)) >= 0.0599
    assert "declared: forward 10 ms/30 ms, backward 20 ms/60 ms" in lk.show.timeline(trace).layout.title.text
    with pytest.raises(lk.errors.PlanError, match=r"2 durations for 1 stage:"):
        lk.launch.train(ranks, plan_of("dp2"), 1, pace=pace, progress=False)


def test_without_tracing_there_are_losses_and_no_events(ranks):
    run = lk.launch.train(ranks, plan_of("dp2"), 3, trace=False, progress=False)
    assert (len(run.losses), run.trace.num_events) == (3, 0)
    assert run.tokens_per_s > 0
    assert run.mfu is None or ranks.backend == "nccl"


def test_the_same_seed_gives_the_same_losses_and_another_does_not(ranks):
    one, two, other = (
        lk.launch.train(ranks, plan_of("dp2"), 3, seed, trace=False, progress=False) for seed in (5, 5, 6)
    )
    assert one.losses == two.losses
    assert one.losses != other.losses


def test_a_live_start_goes_on_and_counts_its_own_steps(ranks):
    whole = lk.launch.train(ranks, plan_of("dp2 tp2"), 4, progress=False)
    half = lk.launch.train(ranks, plan_of("dp2 tp2"), 2, progress=False)
    rest = lk.launch.train(ranks, plan_of("dp2 tp2"), 2, start="live", progress=False)
    assert half.losses + rest.losses == pytest.approx(whole.losses, rel=1e-6)
    assert rest.trace.steps == [0, 1]


def test_a_background_run_is_polled_and_stopped_after_a_step(ranks):
    run = background(ranks, "dp2 tp2")
    reach_step(run, 2)
    first = run.poll()
    assert first.state == "running"
    assert first.step >= 2
    assert len(first.losses) == len(first.grad_norms) == first.step
    reach_step(run, first.step + 1)
    second = run.poll()
    assert second.losses[: first.step] == first.losses
    assert {(e.rank, e.kind, e.start_s) for e in first.events}.isdisjoint(
        {(e.rank, e.kind, e.start_s) for e in second.events}
    )
    assert run.stop(LIMIT_S) is run
    assert run.stop(LIMIT_S) is run
    assert (run.state, run.error) == ("stopped", None)
    assert run.trace.steps == list(range(len(run.losses)))
    assert ranks.run(all_reduce_ones) == [4.0] * 4


def test_a_stop_right_after_the_start_is_heard(ranks):
    run = background(ranks)
    run.stop(LIMIT_S)
    assert run.state == "stopped"
    assert len(run.losses) >= 1


def test_a_stopped_state_is_live(ranks):
    run = background(ranks, "dp2")
    reach_step(run, 1)
    run.stop(LIMIT_S)
    assert lk.launch.train(ranks, run.plan, 1, start="live", progress=False).state == "done"


def test_ranks_train_one_thing_at_a_time(ranks):
    run = background(ranks)
    try:
        with pytest.raises(ClusterError, match=r"still going on these ranks.*run\.stop\(\)"):
            lk.launch.train(ranks, plan_of("dp2"), 1)
    finally:
        run.stop(LIMIT_S)
    assert lk.launch.train(ranks, plan_of("dp2"), 1, progress=False).state == "done"


def test_an_interrupt_ends_the_run_as_stopped_and_the_ranks_go_on(ranks):
    pids = ranks.pids
    run = background(ranks, "pp4 1f1b m4")
    reach_step(run, 1)
    ranks.interrupt(timeout_s=LIMIT_S)
    assert run.wait(LIMIT_S).state == "stopped"
    assert len(run.losses) >= 1
    assert ranks.pids == pids
    with pytest.raises((RankError, PlanError), match=r"live"):
        lk.launch.train(ranks, run.plan, 1, start="live", progress=False)
    assert lk.launch.train(ranks, run.plan, 1, progress=False).state == "done"


@pytest.mark.parametrize("num_ctrl_c", [1, 2])
def test_ctrl_c_while_blocked_ends_the_run_as_stopped(ranks, num_ctrl_c):
    pids = ranks.pids
    before = lk.launch.last_run(ranks)

    def press():
        until(lambda: lk.launch.last_run(ranks) is not before, "the run began")
        reach_step(lk.launch.last_run(ranks), 1)
        for _ in range(num_ctrl_c):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lk.launch.train(ranks, plan_of("pp4 1f1b m4"), LONG, progress=False)
        presser.join(LIMIT_S)
    except KeyboardInterrupt:  # the second came after the first had ended the wait
        presser.join(LIMIT_S)
    run = lk.launch.last_run(ranks)
    until(lambda: run.state != "running", "the run ended")
    assert (run.state, run.error) == ("stopped", None)
    assert len(run.losses) >= 1
    assert ranks.run(all_reduce_ones) == [4.0] * 4
    assert ranks.pids == pids


def test_stop_of_a_run_whose_rank_is_paused_says_what_to_do(own_ranks):
    run = background(own_ranks)
    reach_step(run, 1)
    own_ranks.pause(2)
    with pytest.raises(RankTimeout, match=r"ranks\.interrupt\(\)") as caught:
        run.stop(timeout_s=1.5)
    assert caught.value.action == "stop"
    own_ranks.resume(2)
    assert run.stop(LIMIT_S).state == "stopped"


def test_a_killed_rank_fails_the_run_which_keeps_its_losses(own_ranks):
    run = background(own_ranks, "dp2 tp2")
    reach_step(run, 2)
    own_ranks.kill(2)
    with pytest.raises(RankLost, match="SIGKILL") as caught:
        run.wait(LIMIT_S)
    assert (caught.value.rank, caught.value.signal) == (2, "SIGKILL")
    assert caught.value.step >= 2
    assert (run.state, run.error) == ("failed", caught.value)
    assert len(run.losses) >= 2
    assert run.trace.num_steps >= 2
    with pytest.raises(ClusterError, match=r"rank 2 of 4 is gone.*ranks\.restart\(2\)"):
        lk.launch.train(own_ranks, run.plan, 1)
    own_ranks.restart(2)
    assert lk.launch.train(own_ranks, run.plan, 2, progress=False).losses == pytest.approx(run.losses[:2], rel=1e-6)


def test_what_fails_on_the_ranks_is_raised_with_their_words(ranks, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    with pytest.raises((RankError, PlanError), match="empty"):
        lk.launch.train(ranks, plan_of("dp2"), 1, data=str(empty), progress=False)
    with pytest.raises((RankError, LabError), match="learning_rate"):
        lk.launch.train(ranks, plan_of("dp2"), 20, optimizer="sgd", learning_rate=1e9, clip_norm=None, progress=False)
    run = lk.launch.last_run(ranks)
    assert run.state == "failed"
    assert run.losses
    assert lk.launch.train(ranks, plan_of("dp2"), 1, progress=False).state == "done"


def test_data_of_a_relative_path(ranks, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_bytes(b"all work and no play " * 200)
    monkeypatch.chdir(tmp_path)
    run = lk.launch.train(ranks, plan_of("dp2"), 2, data="mine.txt", progress=False)
    assert run.state == "done"


def test_too_few_ranks_are_refused_before_anything_starts(ranks):
    with pytest.raises(PlanError, match=r"dp\(2\) \* pp\(2\) \* tp\(2\) = 8 but 4 ranks are up"):
        lk.launch.train(ranks, plan_of("dp2 pp2 tp2 m2"), 1)


def test_the_progress_line_ends_as_one_line(ranks, capsys):
    lk.launch.train(ranks, plan_of("dp2"), 2)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "step 2/2" in out
    assert out.rstrip().endswith("done")


def test_a_model_that_the_machine_cannot_hold_is_refused_before_any_rank_is_asked(ranks):
    plan = lk.plan.build(lk.spec.Model.preset("llama3-405b"), lk.spec.Layout.parse("dp4"))
    with pytest.raises(PlanError, match=r"take 24,\d\d\d\.\d GiB \([\d,.]+ GiB on rank 0\), but [\d,.]+ GiB are free"):
        lk.launch.train(ranks, plan, num_steps=1)
