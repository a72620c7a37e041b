"""Calls in the background, timeouts, several threads, and the end of ranks."""

import os
import threading
import time

import pytest
import torch

import labkit as lk
from labkit.cluster import Ranks
from labkit.errors import ClusterError, LabError, PlanError, RankError, RankTimeout
from tests.ranks import work

pytestmark = pytest.mark.ranks

TIMEOUT_S = 60.0


def test_a_timeout_names_who_is_missing_and_ranks_go_on(ranks: Ranks) -> None:
    pids = ranks.pids
    with pytest.raises(RankTimeout, match=r"did not finish <lambda> within 0.5 s and still work on it") as caught:
        ranks.run(lambda: time.sleep(600 if torch.distributed.get_rank() > 1 else 0), timeout_s=0.5)
    assert set(caught.value.missing) >= {2, 3}
    assert caught.value.action == "<lambda>"
    assert set(ranks.interrupt(timeout_s=TIMEOUT_S)) >= {2, 3}
    assert ranks.interrupt() == ()
    assert ranks.interrupt() == ()
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4
    assert ranks.pids == pids


def test_a_call_in_the_background(ranks: Ranks) -> None:
    call = ranks.run(time.sleep, 600, block=False)
    assert not call.done
    assert call.pending() == [0, 1, 2, 3]
    assert repr(call) == f"<Call {call.number} of sleep: ranks 0, 1, 2 and 3 running>"
    assert call.wait(0.05) is False
    with pytest.raises(RankTimeout, match=r"within 0.05 s"):
        call.result(0.05)
    for bad in ("x", 0, -1, float("nan"), True):
        with pytest.raises(PlanError, match="timeout_s="):
            call.wait(bad)  # type: ignore[arg-type]
    ranks.interrupt(timeout_s=TIMEOUT_S)
    for _ in range(2):
        with pytest.raises(RankError, match="sleep was interrupted"):
            call.result(TIMEOUT_S)
    assert call.done
    assert call.wait()
    assert call.pending() == []
    assert repr(call) == f"<Call {call.number} of sleep: done>"


def test_a_result_can_be_read_twice(ranks: Ranks) -> None:
    call = ranks.run(work.rank_number, block=False)
    assert call.result(TIMEOUT_S) is call.result(TIMEOUT_S)
    assert call.result() == [0, 1, 2, 3]


def test_threads_that_run_at_once_are_served_in_one_order_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(work.taken)
    errors: list[BaseException] = []

    def send(first: int) -> None:
        try:
            for value in range(first, first + 20):
                ranks.run(work.appends, value, timeout_s=TIMEOUT_S)
                ranks.run(work.sum_of_ranks, timeout_s=TIMEOUT_S)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=send, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    seen = ranks.run(work.taken)
    assert seen == [seen[0]] * 4
    assert sorted(seen[0]) == [*range(20), *range(100, 120)]


@pytest.mark.parametrize("times", [1, 2], ids=["the call", "the call and the new groups"])
def test_a_call_cut_short_while_it_is_sent_leaves_nothing_behind(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    pids, submit = ranks.pids, ranks._crew.engines.submit
    cuts = [KeyboardInterrupt] * times

    def stop_at_two(rank: int, *rest: object) -> None:
        if rank == 2 and cuts:
            raise cuts.pop()
        submit(rank, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ranks._crew.engines, "submit", stop_at_two)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(work.sum_of_ranks)
    monkeypatch.undo()
    assert not cuts
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4
    assert ranks.interrupt() == ()
    assert ranks.pids == pids


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_forked_child_cannot_use_the_ranks_and_does_not_end_them(ranks: Ranks) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ranks.run(work.rank_number)
        except LabError as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            ranks.stop()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    assert answer == f"ClusterError: These ranks belong to process {os.getpid()}, not to its child {child}."
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4


def test_stopped_ranks_say_so() -> None:
    with lk.cluster.start(1) as ranks:
        assert ranks.run(work.rank_number) == [0]
        assert len(ranks) == ranks.world_size == 1
        under_way = ranks.run(work.sleep_long, block=False)
    with pytest.raises(ClusterError, match=r"The ranks were stopped during sleep_long"):
        under_way.result(timeout_s=60)
    assert ranks.stopped
    assert "stopped" in repr(ranks)
    assert ranks.pids == {}
    ranks.stop()
    for use in (
        lambda: ranks.run(work.rank_number),
        lambda: ranks.run_cell("1"),
        lambda: ranks.interrupt(),
        lambda: ranks.status(),
        lambda: ranks.kill(0),
        lambda: ranks.pause(0),
        lambda: ranks.resume(0),
        lambda: ranks.restart(0),
    ):
        with pytest.raises(ClusterError, match=r"These ranks were stopped. Start new ones"):
            use()


def test_nccl_without_gpus_is_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ClusterError, match=r"backend='nccl' cannot be had: .* Use backend='gloo'"):
            lk.cluster.start(2, backend="nccl")


def test_a_call_that_had_to_wait_names_what_came_first(ranks: Ranks) -> None:
    first = ranks.run(work.sleep_long, block=False)
    with pytest.raises(lk.errors.RankTimeout, match=r"one call at a time, and an earlier call of sleep_long is not"):
        ranks.run(work.rank_number, timeout_s=1)
    with pytest.raises(
        lk.errors.RankTimeout, match=r"an earlier call of sleep_long and an earlier call of rank_number are"
    ):
        ranks.run(work.rank_number, timeout_s=0.1)
    assert ranks.under_way() == ("sleep_long", "rank_number", "rank_number")
    assert ranks.left_over() == ("rank_number", "rank_number")
    ranks.interrupt()
    assert first.done
    assert ranks.run(work.rank_number) == [0, 1, 2, 3]


@pytest.mark.parametrize("on", [[0, 1, 2, 3], [2]])
def test_a_destroyed_process_group_is_built_anew(ranks: Ranks, on: list[int]) -> None:
    ranks.run("torch.distributed:destroy_process_group", ranks=on)
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4


def test_a_call_that_takes_the_streams_away_does_not_end_the_rank(ranks: Ranks) -> None:
    def take_away() -> int:
        import sys

        sys.stdout = sys.stderr = None  # type: ignore[assignment]
        return 1

    assert ranks.run(take_away) == [1] * 4
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4


def test_a_cleared_environment_does_not_end_the_rank(ranks: Ranks) -> None:
    def clear() -> dict[str, str]:
        import os

        kept = dict(os.environ)
        os.environ.clear()
        return kept

    def put_back(kept: dict[str, str]) -> None:
        import os

        os.environ.update(kept)

    kept = ranks.run(clear, ranks=[1])
    ranks.run("torch.distributed:destroy_process_group", ranks=[1])
    ranks.run(put_back, kept[0], ranks=[1])
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4
