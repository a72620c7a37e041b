"""What a run keeps and says, on a stand-in for live ranks: real ranks are in tests/ranks/test_train_run.py."""

import gc
import math
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

import labkit as lk
from labkit.errors import ClusterError, Failure, PlanError, RankError, RankLost, RankTimeout
from labkit.launch.progress import Line, progress_text

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def no_late_events(monkeypatch):
    """Stand-ins report what they report; nothing comes late."""
    monkeypatch.setattr("labkit.launch.run.LAST_EVENTS_S", 0.0)


def small_plan(text="dp2"):
    model = lk.spec.Model(num_layers=2, d_model=16, num_heads=2, vocab_size=256, seq_len=8)
    return lk.plan.build(model, lk.spec.Layout.parse(text))


class FakeCall:
    def __init__(self):
        self._ended = threading.Event()
        self._results, self._error = None, None

    def end(self, results=None, error=None):
        self._results, self._error = results, error
        self._ended.set()

    def result(self, timeout_s=None):
        assert self._ended.wait(LIMIT_S)
        if self._error is not None:
            raise self._error
        return self._results


class FakeRanks:
    """Answers like live ranks, when the test says so."""

    backend = "gloo"

    def __init__(self, num_ranks=2, offsets=None):
        self.num_ranks, self.offsets = num_ranks, dict.fromkeys(range(num_ranks), 0.0) if offsets is None else offsets
        self.calls, self.told, self.listeners, self.states = [], [], {}, ["idle"] * num_ranks
        self.interrupts = 0
        self.refuse = None

    def __len__(self):
        return self.num_ranks

    def status(self):
        return [SimpleNamespace(rank=i, state=state, device="cpu") for i, state in enumerate(self.states)]

    def clock_offsets(self):
        if self.offsets == {}:
            raise ClusterError("no rank is up")
        return self.offsets

    def subscribe(self, topic, listener):
        self.listeners.setdefault(topic, []).append(listener)
        return lambda: self.listeners[topic].remove(listener)

    def run(self, fn, *args, block=True):
        assert fn == "labkit.rank.training:train"
        assert not block
        if self.refuse is not None:
            raise self.refuse
        self.calls.append(FakeCall())
        return self.calls[-1]

    def tell(self, topic):
        self.told.append(topic)

    def interrupt(self, timeout_s=None):
        self.interrupts += 1
        self.calls[-1].end(error=interrupted_error())

    def step(self, step, loss=1.0):
        for listener in self.listeners["step"]:
            listener(0, {"step": step, "loss": loss, "grad_norm": 2.0, "step_s": 0.5})
        for rank in range(self.num_ranks):
            for listener in self.listeners["events"]:
                listener(rank, {"events": [["F", 10.0 + step, 0.1, step, 0, 0], ["step", 10.0 + step, 0.5, step]]})

    def result(self, num_steps):
        value = {"losses": [1.0] * num_steps, "grad_norms": [2.0] * num_steps, "step_s": [0.5] * num_steps}
        return [value] + [dict(value)] * (self.num_ranks - 1)


def interrupted_error():
    return RankError({0: Failure(type="KeyboardInterrupt", message="", interrupted=True)})


def background(ranks, **options):
    return lk.launch.train(ranks, small_plan(), **{"num_steps": 3, "block": False, **options})


def test_a_run_keeps_losses_and_events_of_every_step():
    ranks = FakeRanks()
    run = background(ranks)
    for step in range(3):
        ranks.step(step, loss=3.0 - step)
    assert run.poll().losses == (3.0, 2.0, 1.0)
    ranks.calls[0].end(results=ranks.result(3))
    assert run.wait(LIMIT_S) is run
    assert (run.state, run.losses, run.grad_norms, run.step_s) == ("done", [1.0] * 3, [2.0] * 3, [0.5] * 3)
    assert run.trace.num_steps == 3
    assert run.trace.ranks == [0, 1]
    assert run.trace.aligned
    assert run.trace.events[0].start_s == 0.0
    assert run.trace is run.trace
    assert all(not listeners for listeners in ranks.listeners.values())
    assert run.tokens_per_s == pytest.approx(run.plan.tokens_per_step / 0.5)


def test_poll_gives_each_event_once():
    ranks = FakeRanks()
    run = background(ranks)
    ranks.step(0)
    assert len(run.poll().events) == 4
    assert run.poll().events == ()
    ranks.step(1)
    progress = run.poll()
    assert {event.step for event in progress.events} == {1}
    assert (progress.step, progress.state, progress.grad_norms) == (2, "running", (2.0, 2.0))
    ranks.calls[0].end(results=ranks.result(2))
    run.wait(LIMIT_S)


def test_a_failure_keeps_the_losses_so_far():
    ranks = FakeRanks()
    run = background(ranks)
    ranks.step(0, loss=4.0)
    error = RankLost("[rank 1] process was killed by SIGKILL.", rank=1, signal="SIGKILL")
    ranks.calls[0].end(error=error)
    with pytest.raises(RankLost) as caught:
        run.wait(LIMIT_S)
    assert run.error is caught.value
    assert (caught.value.rank, caught.value.step, caught.value.signal) == (1, 1, "SIGKILL")
    assert str(caught.value) == f"[step 1] {error}"
    assert (run.state, run.losses, run.trace.num_steps) == ("failed", [4.0], 1)
    assert "failed" in repr(run)
    assert "SIGKILL" in repr(run)


def test_blocking_train_raises_what_the_ranks_raised():
    ranks = FakeRanks()
    error = RankError({1: Failure(type="ValueError", message="bad")})
    ender = threading.Thread(target=lambda: (until(lambda: ranks.calls), ranks.calls[0].end(error=error)))
    ender.start()
    with pytest.raises(RankError) as caught:
        lk.launch.train(ranks, small_plan(), 3, progress=False)
    ender.join(LIMIT_S)
    assert caught.value.failures[1].message == "bad"
    assert lk.launch.last_run(ranks).state == "failed"


def test_stop_asks_the_ranks_and_waits_and_a_second_stop_does_nothing():
    ranks = FakeRanks()
    run = background(ranks)
    ranks.step(0)
    ender = threading.Thread(target=lambda: (until(lambda: ranks.told), ranks.calls[0].end(results=ranks.result(1))))
    ender.start()
    assert run.stop(LIMIT_S) is run
    assert run.state == "stopped"
    ender.join(LIMIT_S)
    told = list(ranks.told)
    assert run.stop() is run
    assert ranks.told == told
    assert set(told) == {"stop"}
    assert run.wait() is run


def test_stop_that_does_not_end_says_what_to_do():
    ranks = FakeRanks()
    run = background(ranks)
    ranks.step(0)
    with pytest.raises(RankTimeout, match=r"ranks\.interrupt\(\)") as caught:
        run.stop(timeout_s=0.05)
    assert (caught.value.action, caught.value.step, caught.value.missing) == ("stop", 1, (0, 1))
    assert "1 of 3 steps" in str(caught.value)
    ranks.interrupt()
    assert run.wait(LIMIT_S).state == "stopped"


def test_an_interrupt_by_hand_ends_the_run_as_stopped():
    ranks = FakeRanks()
    run = background(ranks)
    ranks.step(0)
    ranks.interrupt()
    assert run.wait(LIMIT_S).state == "stopped"
    assert run.error is None
    assert run.losses == [1.0]


def test_wait_in_vain_is_a_timeout_and_the_run_goes_on():
    ranks = FakeRanks()
    run = background(ranks)
    with pytest.raises(RankTimeout, match="0 of 3 steps"):
        run.wait(timeout_s=0.01)
    assert run.state == "running"
    ranks.calls[0].end(results=ranks.result(3))
    run.wait(LIMIT_S)


@pytest.mark.parametrize("num_ctrl_c", [1, 2])
def test_ctrl_c_ends_the_run_as_stopped(monkeypatch, num_ctrl_c):
    ranks = FakeRanks()
    run = background(ranks)
    left = [num_ctrl_c]
    wait = run._ended.wait

    def interrupted_wait(timeout_s=None):
        if left[0] and threading.current_thread() is threading.main_thread():
            left[0] -= 1
            raise KeyboardInterrupt
        return wait(timeout_s)

    monkeypatch.setattr(run._ended, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        run._follow(progress=False)
    until(lambda: run.state != "running")
    assert run.state == "stopped"
    assert run.error is None
    assert ranks.told[0] == "stop"
    assert ranks.interrupts == 1


def test_one_run_at_a_time():
    ranks = FakeRanks()
    run = background(ranks)
    with pytest.raises(ClusterError, match=r"still going .* run\.stop\(\)"):
        background(ranks)
    ranks.calls[0].end(results=ranks.result(3))
    run.wait(LIMIT_S)
    second = background(ranks)
    ranks.calls[1].end(results=ranks.result(3))
    second.wait(LIMIT_S)
    assert lk.launch.last_run(ranks) is second


def test_two_threads_cannot_both_start():
    ranks = FakeRanks()
    outcomes = []

    def start():
        try:
            outcomes.append(background(ranks))
        except ClusterError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(ranks.calls) == 1
    assert sum(isinstance(o, ClusterError) for o in outcomes) == 7
    ranks.calls[0].end(results=ranks.result(3))
    lk.launch.last_run(ranks).wait(LIMIT_S)


def test_a_refused_submit_leaves_no_listener_and_no_run():
    ranks = FakeRanks()
    ranks.refuse = ClusterError("stopped")
    with pytest.raises(ClusterError, match="stopped"):
        background(ranks)
    assert lk.launch.last_run(ranks) is None
    assert all(not listeners for listeners in ranks.listeners.values())


def test_lost_ranks_are_named_before_anything_starts():
    ranks = FakeRanks()
    ranks.states[1] = "lost"
    with pytest.raises(ClusterError, match=r"rank 1 of 2 is gone.*ranks\.restart\(1\)"):
        background(ranks)
    assert not ranks.calls


def test_too_few_ranks():
    with pytest.raises(PlanError) as caught:
        lk.launch.train(FakeRanks(6), small_plan("dp2 tp2 pp2 1f1b m4"))
    assert str(caught.value) == (
        "dp(2) * pp(2) * tp(2) = 8 but 6 ranks are up: each rank has one place in the mesh. "
        "Start 8 ranks or change an axis."
    )


@pytest.mark.parametrize("plan", [None, "dp2", lk.spec.Layout.parse("dp2"), 3])
def test_what_is_no_plan(plan):
    with pytest.raises(PlanError, match=rf"{type(plan).__name__}.*lk\.plan\.build"):
        lk.launch.train(FakeRanks(), plan)


@pytest.mark.parametrize(
    "options", [{"num_steps": 0}, {"num_steps": True}, {"optimizer": "adam"}, {"clip_norm": math.nan}, {"pace": 0.1}]
)
def test_bad_options_are_refused_before_any_rank_is_asked(options):
    ranks = FakeRanks()
    with pytest.raises(PlanError):
        background(ranks, **options)
    assert not ranks.calls


def test_an_ended_run_does_not_keep_its_ranks_alive():
    ranks = FakeRanks()
    run = background(ranks)
    ranks.calls[0].end(results=ranks.result(3))
    run.wait(LIMIT_S)
    forgotten = weakref.ref(ranks)
    del ranks
    until(lambda: gc.collect() >= 0 and forgotten() is None)
    assert run.state == "done"


def test_no_peak_is_known_for_a_cpu():
    ranks = FakeRanks()
    run = background(ranks)
    ranks.step(0)
    assert run.mfu is None
    assert "cpu" in run.efficiency.reason
    ranks.calls[0].end(results=ranks.result(3))
    run.wait(LIMIT_S)


def test_ranks_without_clocks_give_a_trace_that_says_so():
    ranks = FakeRanks(offsets={})
    run = background(ranks)
    ranks.step(0)
    assert not run.trace.aligned
    assert run.trace.num_steps == 1
    ranks.calls[0].end(results=ranks.result(3))
    run.wait(LIMIT_S)


def test_the_progress_line_outside_a_terminal_prints_its_last_text_only(capsys):
    line = Line()
    line.update("one")
    line.update("two", final=True)
    assert capsys.readouterr().out == "two\n"
    assert "stopped" in progress_text(step=1, num_steps=2, loss=1.0, tokens_per_s=None, state="stopped")


def test_a_run_shows_itself_in_one_line():
    ranks = FakeRanks()
    run = background(ranks)
    ranks.step(0, loss=5.5)
    assert "\n" not in repr(run)
    assert "dp2" in repr(run)
    assert "step 1/3" in repr(run)
    assert run._repr_html_().startswith("<code>&lt;Run")
    ranks.calls[0].end(results=ranks.result(3))
    run.wait(LIMIT_S)


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("data", ["/no/such/file", "~nobody/z", "x" * 5000])
def test_data_that_is_not_there_is_refused_before_any_rank_is_asked(data):
    ranks = FakeRanks()
    with pytest.raises(PlanError, match="is no usable path"):
        lk.launch.train(ranks, small_plan(), data=data)
    assert ranks.calls == []


def test_arguments_the_wrong_way_round():
    with pytest.raises(PlanError, match=r"ranks is a Plan.*Use lk\.launch\.train\(ranks, plan\)"):
        lk.launch.train(small_plan(), FakeRanks())
