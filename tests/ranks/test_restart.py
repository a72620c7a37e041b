"""Many restarts, and many starts and stops, leave nothing behind in this process or on this machine."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import labkit as lk
from labkit.cluster import Ranks
from tests import shared_memory
from tests.ranks import waits

pytestmark = pytest.mark.ranks

SETTLE_TIMEOUT_S = 60.0
NUM_RESTARTS = 30
NUM_ROUNDS = 10


def held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    process = psutil.Process()
    return {
        "processes": len(process.children(recursive=True)),
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }


def assert_no_growth(before: dict[str, int], files: set[str]) -> None:
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while any(number > before[what] for what, number in held().items()) or shared_memory.left_since(files):
        names = [thread.name for thread in threading.enumerate()]
        assert time.monotonic() < deadline, f"before {before}, now {held()}, {shared_memory.left_since(files)}; {names}"
        time.sleep(0.1)


@pytest.mark.timeout(900)
def test_restarts_in_a_row(ranks: Ranks) -> None:
    pids = ranks.pids
    ranks.restart(1)
    before, files = held(), shared_memory.files()
    for _ in range(NUM_RESTARTS):
        ranks.restart(1)
    assert ranks.run(waits.sum_of_ranks) == [6.0] * 4
    assert ranks.pids == {**pids, 1: ranks.pids[1]}
    assert_no_growth(before, files)


@pytest.mark.timeout(900)
def test_interrupts_in_a_row(ranks: Ranks) -> None:
    def held_by_rank() -> tuple[int, int]:
        return len(waits.os.listdir("/proc/self/fd")), len(waits.os.listdir("/proc/self/task"))

    def once() -> None:
        ranks.run(waits.barrier, block=False)
        ranks.interrupt()

    once()
    pids, before = ranks.pids, ranks.run(held_by_rank)
    for _ in range(20):
        once()
    assert ranks.run(waits.sum_of_ranks) == [6.0] * 4
    assert ranks.pids == pids
    after = ranks.run(held_by_rank)
    for now, was in zip(after, before, strict=True):
        assert now[0] <= was[0] + 4, "descriptors grow"
        assert now[1] <= was[1] + 2, "threads grow"


def start_run_stop() -> None:
    with lk.cluster.start(1) as ranks:
        assert ranks.run(waits.sum_of_ranks) == [0.0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_starts_and_stops_two_at_a_time() -> None:
    def one_round() -> None:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(start_run_stop) for _ in range(2)]:
                done.result()

    one_round()  # what is made once for all
    before, files = held(), shared_memory.files()
    for _ in range(NUM_ROUNDS):
        one_round()
    assert_no_growth(before, files)
