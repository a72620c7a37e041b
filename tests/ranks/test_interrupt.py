"""`interrupt` ends every kind of wait in the same processes, and the next collective is right."""

import contextlib
import signal
import threading
import time

import pytest

import labkit as lk
from labkit.cluster import Call, Ranks
from labkit.errors import RankError, RankTimeout
from tests.ranks import waits

pytestmark = pytest.mark.ranks

TIMEOUT_S = 60.0
SETTLE_S = 0.1


@contextlib.contextmanager
def entered(ranks: Ranks, number: int = 3):
    """Collects which ranks said that they are about to wait; leaving it waits until `number` of them did."""
    seen: list[int] = []
    undo = ranks.subscribe("entered", lambda rank, message: seen.append(rank))
    try:
        yield seen
        deadline = time.monotonic() + TIMEOUT_S
        while len(seen) < number:
            assert time.monotonic() < deadline, f"only ranks {seen} began to wait; {ranks.status()}"
            time.sleep(0.01)
        time.sleep(SETTLE_S)
    finally:
        undo()


def begin(ranks: Ranks, fn, *args) -> Call:
    with entered(ranks):
        return ranks.run(fn, *args, block=False)


def assert_right(ranks: Ranks) -> None:
    assert ranks.run(waits.sum_of_ranks) == [6.0] * 4


def check_interrupt(ranks: Ranks, fn, *args) -> None:
    pids = ranks.pids
    call = begin(ranks, fn, *args)
    busy = ranks.interrupt(timeout_s=TIMEOUT_S)
    assert set(busy) >= {0, 1, 2}
    assert ranks.pids == pids
    with pytest.raises(RankError) as caught:
        call.result(TIMEOUT_S)
    assert all(one.interrupted for rank, one in caught.value.failures.items() if rank != waits.MISSING)
    assert_right(ranks)


@pytest.mark.parametrize("collective", waits.COLLECTIVES, ids=lambda fn: fn.__name__)
def test_collectives_on_the_world(ranks: Ranks, collective) -> None:
    check_interrupt(ranks, collective)


@pytest.mark.parametrize("collective", waits.COLLECTIVES, ids=lambda fn: fn.__name__)
def test_collectives_on_a_new_group(ranks: Ranks, collective) -> None:
    check_interrupt(ranks, waits.on_new_group, collective)


@pytest.mark.parametrize("collective", [waits.all_reduce, waits.barrier], ids=lambda fn: fn.__name__)
def test_collectives_on_mesh_axes(ranks: Ranks, collective) -> None:
    check_interrupt(ranks, waits.on_mesh_axes, collective)


@pytest.mark.parametrize("fn", waits.OTHERS, ids=lambda fn: fn.__name__)
def test_other_waits(ranks: Ranks, fn) -> None:
    check_interrupt(ranks, fn)


def test_code_that_cleans_up_does_so(ranks: Ranks) -> None:
    begin(ranks, waits.cleans_up)
    ranks.interrupt()
    assert ranks.run(lambda: __import__("os").environ["LABKIT_TEST_CLEANED"]) == ["yes", "yes", "yes", "no"]


def test_cell(ranks: Ranks) -> None:
    pids = ranks.pids
    errors: list[BaseException] = []
    code = "import torch.distributed as dist\nfrom labkit.rank import report\nreport.emit('entered', {})\n"
    code += "kept = 7\nif dist.get_rank() != 3:\n    dist.barrier()\n"

    def run() -> None:
        try:
            ranks.run_cell(code)
        except RankError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    with entered(ranks, 4):
        thread.start()
    ranks.interrupt()
    thread.join(TIMEOUT_S)
    assert errors
    assert ranks.pids == pids
    ranks.run_cell("assert kept == 7")


def test_twice_in_a_row_and_when_idle(ranks: Ranks) -> None:
    begin(ranks, waits.barrier)
    assert set(ranks.interrupt()) >= {0, 1, 2}
    assert ranks.interrupt() == ()
    assert_right(ranks)


def test_from_several_threads(ranks: Ranks) -> None:
    begin(ranks, waits.barrier)
    threads = [threading.Thread(target=ranks.interrupt) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert_right(ranks)


def test_queued_calls_end_and_later_ones_are_not_touched(ranks: Ranks) -> None:
    first = begin(ranks, waits.barrier)
    second = ranks.run(waits.sum_of_ranks, block=False)
    ranks.interrupt()
    later = ranks.run(waits.sum_of_ranks, block=False)
    for call in (first, second):
        with pytest.raises(RankError):
            call.result(TIMEOUT_S)
    assert later.result(TIMEOUT_S) == [6.0] * 4


def test_ranks_that_wait_for_a_failed_one_are_freed_and_named(ranks: Ranks) -> None:
    def fails() -> None:
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        dist.barrier()

    dist = waits.dist
    pids = ranks.pids
    with pytest.raises(RankError) as caught:
        ranks.run(fails, timeout_s=TIMEOUT_S)
    assert set(caught.value.failures) == {1}
    assert set(caught.value.freed) == {0, 2, 3}
    assert "bad batch" in str(caught.value)
    assert ranks.pids == pids
    assert_right(ranks)


def test_a_rank_that_computes_while_another_failed_is_left_to_finish(ranks: Ranks) -> None:
    def fails() -> int:
        from labkit.rank import report

        if waits.dist.get_rank() == 1:
            raise ValueError("bad batch")
        x = 0
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            x += 1
        report.emit("finished", {})
        return x

    finished: list[int] = []
    undo = ranks.subscribe("finished", lambda rank, message: finished.append(rank))
    with pytest.raises(RankError) as caught:
        ranks.run(fails, timeout_s=TIMEOUT_S)
    undo()
    assert caught.value.freed == ()
    assert sorted(finished) == [0, 2, 3]


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_ctrl_c_during_run(ranks: Ranks, delay_s: float) -> None:
    pids = ranks.pids
    timer = threading.Timer(delay_s, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        ranks.run(waits.barrier)
        time.sleep(TIMEOUT_S)  # the signal comes now if it did not come sooner
    timer.join()
    assert ranks.pids == pids
    assert_right(ranks)


def ctrl_c_when(monkeypatch: pytest.MonkeyPatch, owner, name: str) -> None:
    """Raise Ctrl-C in the main thread once, as `name` is reached."""
    original = getattr(owner, name)
    left = [1]

    def reached(*args, **kwargs):
        if left and threading.current_thread() is threading.main_thread():
            left.pop()
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, reached)


@pytest.mark.parametrize("place", ["_free", "rebuild", "_finish", "_busy"])
def test_ctrl_c_during_interrupt(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    pids = ranks.pids
    begin(ranks, waits.barrier)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        ctrl_c_when(patch, lk.cluster.freeing.Freeing, place)
        ranks.interrupt()
    ranks.interrupt()
    assert_right(ranks)
    assert ranks.pids == pids


@pytest.mark.parametrize("place", ["rebuild", "_finish"])
def test_ctrl_c_while_run_builds_groups(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    pids = ranks.pids
    ranks._crew.stale = True
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        ctrl_c_when(patch, lk.cluster.freeing.Freeing, place)
        ranks.run(waits.sum_of_ranks)
    assert_right(ranks)
    assert ranks.pids == pids


def test_interrupt_while_another_thread_builds_groups(ranks: Ranks) -> None:
    ranks._crew.stale = True
    thread = threading.Thread(target=ranks._freeing.rebuild)
    thread.start()
    ranks.interrupt()
    thread.join(TIMEOUT_S)
    assert_right(ranks)


def test_ranks_that_cannot_be_freed_are_named_and_restarted_only_by_force(own_ranks: Ranks) -> None:
    pids = own_ranks.pids

    def stuck() -> None:
        if waits.dist.get_rank() == 1:
            waits.swallows_for_ever()
        elif waits.dist.get_rank() == 2:
            waits.holds_the_gil()
        else:
            waits.all_reduce()

    call = begin(own_ranks, stuck)
    time.sleep(1.0)
    with pytest.raises(RankTimeout) as caught:
        own_ranks.interrupt(timeout_s=8)
    assert caught.value.missing == (1, 2)
    assert "rank 1 does not end what it does in swallows_for_ever" in str(caught.value)
    assert "rank 2 holds the GIL" in str(caught.value)
    assert "force=True" in str(caught.value)
    assert own_ranks.pids == pids
    own_ranks.interrupt(force=True, timeout_s=8)
    assert_right(own_ranks)
    now = own_ranks.pids
    assert (now[0], now[3]) == (pids[0], pids[3])
    assert now[1] != pids[1]
    assert now[2] != pids[2]
    assert call.done

    own_ranks.pause(2)
    own_ranks.run(waits.sum_of_ranks, block=False)
    with pytest.raises(RankTimeout, match="rank 2 is paused") as caught:
        own_ranks.interrupt(timeout_s=8)
    assert caught.value.missing == (2,)
    own_ranks.interrupt(force=True, timeout_s=8)
    assert_right(own_ranks)
    assert own_ranks.pids == {**now, 2: own_ranks.pids[2]}
