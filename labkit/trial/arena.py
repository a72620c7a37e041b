"""What runs inside a sandbox: fresh ranks, one answer tried on them, and what was seen as lines of JSON.

`python -m labkit.trial.arena` reads one job on stdin and writes to what was its stdout. This process runs code that
nobody has looked at (results of ranks are unpickled here), so whoever reads the lines believes nothing in them.

The job: `{"cells": [[name, source]], "names": [...], "cases": [{"trial", "members", "inputs"}], "num_ranks", "case_s",
"start_s", "limits": {"data": bytes, "nproc": threads, "fsize": bytes}}`. The lines: `{"ready": true}` when the ranks
are up and before they are told anything of the answer, or `{"failed": why}`; then `{"index": i, "observation": {...}}`
for each case, in order.
"""

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.cluster import start
from labkit.errors import LabError
from labkit.exercise import Case, Observation
from labkit.trial.running import Answer, observe

__all__ = ["MAX_LINE_BYTES", "job", "main"]

# So much one case may say; more is not sent, and not read.
MAX_LINE_BYTES = 8 << 20

_LIMITS = {"data": resource.RLIMIT_DATA, "fsize": resource.RLIMIT_FSIZE, "nproc": resource.RLIMIT_NPROC}


def job(
    answer: Answer, cases: Sequence[Case], *, num_ranks: int, case_s: float, start_s: float, limits: Mapping[str, int]
) -> bytes:
    """What the arena reads: of the cases only what a trial needs, not their names or what they are worth."""
    told = [{"trial": one.trial, "members": list(one.members), "inputs": dict(one.inputs)} for one in cases]
    return json.dumps(
        {
            "cells": answer.cells,
            "names": answer.names,
            "cases": told,
            "num_ranks": num_ranks,
            "case_s": case_s,
            "start_s": start_s,
            "limits": dict(limits),
        }
    ).encode()


def main() -> None:
    """Try the answer of the job on stdin."""
    channel = os.dup(1)  # not inherited by anything that is started from here
    try:
        task = json.load(sys.stdin)
        for name, most in task["limits"].items():
            _limit(_LIMITS[name], most)
        _limit(resource.RLIMIT_CORE, 0)
        ranks = start(task["num_ranks"], backend="gloo", timeout_s=task["start_s"])
    except (LabError, OSError) as error:
        _send(channel, {"failed": f"{type(error).__name__}: {error}"[:2_000]})
        os._exit(1)
    # What the answer prints, here or on the ranks, goes nowhere near the channel.
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    _send(channel, {"ready": True})
    _try(channel, task, lambda answer, cases: observe(ranks, answer, cases, timeout_s=task["case_s"]))
    ranks.stop()
    os._exit(0)  # nothing that the answer left in this process is waited for


def _try(channel: int, task: Mapping[str, Any], seen: Callable[[Answer, list[Case]], Any]) -> None:
    answer = Answer(names=tuple(task["names"]), cells=tuple((name, source) for name, source in task["cells"]))
    cases = [
        Case(name=f"case {number}", criterion="", **{**one, "members": tuple(one["members"])})
        for number, one in enumerate(task["cases"])
    ]
    index = 0
    try:
        for observation in seen(answer, cases):
            _send(channel, {"index": index, "observation": observation.to_plain()})
            index += 1
    except LabError as error:  # the answer ended what holds the ranks
        lost = Observation(outcome="lost", message=f"the ranks broke: {error}"[:2_000])
        _send(channel, {"index": index, "observation": lost.to_plain()})


def _send(channel: int, message: Mapping[str, Any]) -> None:
    line = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        text = f"what the answer returned takes {len(line)} bytes, and {MAX_LINE_BYTES} are read: return less."
        much = Observation(outcome="raised", message=text, seconds=message["observation"]["seconds"])
        return _send(channel, {**message, "observation": much.to_plain()})
    while line:
        line = line[os.write(channel, line) :]
    return None


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    main()
