"""Interrupt of ranks that are stuck in every kind of wait, the missing rank doing nothing; beside plain ipyparallel.

    python -m benchmarks.interrupt [--pairs N]

A pair is one round over all kinds of wait. Ipyparallel's own interrupt (SIGINT to its engines) is tried once on a
collective, with a time limit: it frees nobody.
"""

# ruff: noqa: PLC0415  (functions bring their imports along to the ranks)

import signal
import socket
import statistics
import sys
import time

import ipyparallel

import labkit as lk
from benchmarks.pairs import arguments, json_line, say
from benchmarks.waits import WAITS

BAR_S = 1.0
STUCK_FOR_S = 1.0
PEER_LIMIT_S = 5.0
LIMIT_S = 60.0


def all_reduce_rank() -> float:
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()


def stuck(wait):
    """A function for every rank: its own number, then the wait."""

    def run(wait=wait):
        import os

        return wait(int(os.environ["LABKIT_RANK"]))

    return run


def interrupted(ranks: "lk.cluster.Ranks", name: str) -> float:
    """Seconds from `interrupt()` until every rank is idle.

    Raises:
        RuntimeError: ranks were not stuck, a process was lost, or the next all-reduce is wrong.
    """
    pids = ranks.pids
    call = ranks.run(stuck(WAITS[name]), block=False)
    deadline = time.monotonic() + LIMIT_S
    while call.pending() != [0, 1, 2] and time.monotonic() < deadline:
        time.sleep(0.05)
    if call.wait(STUCK_FOR_S) or call.pending() != [0, 1, 2]:
        raise RuntimeError(f"{name}: {call}, though ranks 0, 1 and 2 should be stuck and rank 3 idle")
    began = time.perf_counter()
    ranks.interrupt(timeout_s=LIMIT_S)
    if not call.wait(LIMIT_S):
        raise RuntimeError(f"{name}: {call} after interrupt()")
    seconds = time.perf_counter() - began
    if ranks.pids != pids:
        raise RuntimeError(f"{name}: processes were {pids} and are {ranks.pids}")
    if (sums := ranks.run(all_reduce_rank, timeout_s=LIMIT_S)) != [10.0] * 4:
        raise RuntimeError(f"{name}: the next all-reduce gave {sums}")
    return seconds


def peer_returns() -> bool:
    """Whether plain ipyparallel frees ranks that wait in a collective within the limit."""

    def join(rank: int, port: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = ipyparallel.Cluster(n=4, log_level=40)
    client = cluster.start_and_connect_sync(activate=False)
    try:
        engines = list(enumerate(client.ids))
        for joined in [client[i].apply_async(join, rank, port) for rank, i in engines]:
            joined.get(timeout=LIMIT_S)
        waiting = [client[i].apply_async(WAITS["collective on the world"], rank) for rank, i in engines]
        time.sleep(STUCK_FOR_S)
        cluster.signal_engines_sync(signal.SIGINT)
        deadline = time.monotonic() + PEER_LIMIT_S
        while time.monotonic() < deadline and not all(one.ready() for one in waiting):
            time.sleep(0.05)
        return all(one.ready() for one in waiting)
    finally:
        client.close()
        cluster.stop_cluster_sync()


def main() -> int:
    """Interrupt every kind of wait; 0 when each was over in time."""
    options = arguments(__doc__)
    seconds: dict[str, list[float]] = {name: [] for name in WAITS}
    with lk.cluster.start(4, backend="gloo") as ranks:
        for number in range(options.pairs):
            for name in WAITS if number % 2 == 0 else reversed(WAITS):
                seconds[name].append(interrupted(ranks, name))
            say(f"  round {number + 1}/{options.pairs}: slowest {max(times[-1] for times in seconds.values()):.3f} s")
    peer = "returned" if peer_returns() else f"did not return within {PEER_LIMIT_S:g} s"
    print(
        f"interrupt: {options.pairs} rounds, seconds until all ranks are idle, no process lost, next all-reduce right"
    )
    print(f"  {'rank waits in':26}  median  slowest  bar")
    for name, times in seconds.items():
        verdict = f"<= {BAR_S:g}: {'met' if max(times) <= BAR_S else 'MISSED'}"
        print(f"  {name:26}  {statistics.median(times):6.3f}  {max(times):7.3f}  {verdict}")
    print(f"  plain ipyparallel, collective on the world: {peer}")
    met = all(max(times) <= BAR_S for times in seconds.values())
    rows = {
        name: {"median_s": round(statistics.median(t), 4), "max_s": round(max(t), 4)} for name, t in seconds.items()
    }
    json_line("interrupt", rounds=options.pairs, waits=rows, bar_s=BAR_S, ipyparallel=peer, met=met)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
