"""A trivial function on four ranks: `ranks.run` against ipyparallel's `DirectView.apply_sync`, and nbdistributed.

python -m benchmarks.trivial_cell [--pairs N]
"""

import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable

import ipyparallel

import labkit as lk
from benchmarks.children import Child
from benchmarks.pairs import arguments, compare, report, say

BAR = 1.2
NUM_CALLS = 40

# nbdistributed lives in cells of an IPython shell, so it gets a process of its own.
NBDISTRIBUTED = f"""
import contextlib, io, statistics, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
def cell(magic, text):
    with contextlib.redirect_stdout(out := io.StringIO()):
        result = shell.run_cell(magic + "\\n" + text)
    result.raise_error()
    return out.getvalue()
cell("%load_ext nbdistributed", "")
cell("%dist_init -n 4", "")
try:
    for _ in range(5):
        answer = cell("%%distributed", "1")
    if "Rank 3" not in answer:
        raise RuntimeError("rank 3 did not answer: " + answer)
    seconds = []
    for _ in range({NUM_CALLS}):
        began = time.perf_counter()
        cell("%%distributed", "1")
        seconds.append(time.perf_counter() - began)
    print("SECONDS", statistics.median(seconds), flush=True)
finally:
    cell("%dist_shutdown", "")
"""


def trivial() -> int:
    return 1


def median_seconds(call: Callable[[], object]) -> float:
    """The median time of a call, after a few to warm up."""
    for _ in range(5):
        call()
    seconds = []
    for _ in range(NUM_CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def nbdistributed() -> float:
    """The median time of a trivial nbdistributed cell."""
    # It starts its ranks with whatever `python` is on the PATH.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    with Child([sys.executable, "-c", NBDISTRIBUTED], env={"PATH": path}) as child:
        line, _ = child.line("SECONDS", 120.0)
    return float(line.split()[1])


def peers() -> dict[str, Callable[[], float]]:
    """Further peers that are installed here."""
    try:
        importlib.metadata.version("nbdistributed")
    except importlib.metadata.PackageNotFoundError:
        say("nbdistributed is not installed here, so it is left out (pip install --no-deps nbdistributed)")
        return {}
    return {"nbdistributed": nbdistributed}


def main() -> int:
    """Compare; 0 when the bar is met."""
    options = arguments(__doc__)
    plain = ipyparallel.Cluster(n=4, log_level=40)
    client = plain.start_and_connect_sync(activate=False)
    try:
        view = client[:]
        with lk.cluster.start(4, backend="gloo") as ranks:
            if ranks.run(trivial) != [1] * 4 or view.apply_sync(trivial) != [1] * 4:
                raise RuntimeError("a trivial call did not give 1 on each of four ranks")
            jobs = {
                "ipyparallel": lambda: median_seconds(lambda: view.apply_sync(trivial)),
                "labkit": lambda: median_seconds(lambda: ranks.run(trivial)),
                **peers(),
            }
            comparison = compare(jobs, base="ipyparallel", pairs=options.pairs)
    finally:
        client.close()
        plain.stop_cluster_sync()
    return 0 if report("trivial cell", comparison, bars={"labkit": BAR}) else 1


if __name__ == "__main__":
    sys.exit(main())
