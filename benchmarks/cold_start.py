"""Cold start: a fresh Python process to the first all-reduce on four ranks, imports included, against ipyparallel.

python -m benchmarks.cold_start [--pairs N]
"""

import sys

from benchmarks.children import Child
from benchmarks.pairs import arguments, compare, report

LIMIT_S = 120.0
BAR = 0.4

LABKIT = """
import labkit as lk

def first_all_reduce():
    import torch, torch.distributed as dist
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

if __name__ == "__main__":
    ranks = lk.cluster.start(4, backend="gloo")
    print("READY", ranks.run(first_all_reduce), flush=True)
    ranks.stop()
"""

PLAIN = """
import socket
import ipyparallel as ipp

def first_all_reduce(rank, port):
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    cluster = ipp.Cluster(n=4, log_level=40)
    client = cluster.start_and_connect_sync(activate=False)
    results = [client[i].apply_async(first_all_reduce, rank, port) for rank, i in enumerate(client.ids)]
    print("READY", [r.get(timeout=60) for r in results], flush=True)
    cluster.stop_cluster_sync()
"""


def cold(program: str) -> float:
    """Seconds from starting a Python process to its first all-reduce."""
    with Child([sys.executable, "-c", program]) as child:
        line, seconds = child.line("READY", LIMIT_S)
        if line != "READY [4.0, 4.0, 4.0, 4.0]":
            raise RuntimeError(f"the all-reduce gave {line!r}, not four times 4.0")
    return seconds


def main() -> int:
    """Compare; 0 when the bar is met."""
    options = arguments(__doc__)
    jobs = {"ipyparallel": lambda: cold(PLAIN), "labkit": lambda: cold(LABKIT)}
    comparison = compare(jobs, base="ipyparallel", pairs=options.pairs)
    return 0 if report("cold start", comparison, bars={"labkit": BAR}) else 1


if __name__ == "__main__":
    sys.exit(main())
