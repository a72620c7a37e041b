"""What runs inside a sandbox: fresh ranks, one answer tried on them, and what was seen as lines of JSON.

`python -m labkit.trial.arena` reads lines from stdin and writes lines to what was its stdout. This process runs code
that nobody has looked at (results of ranks are unpickled here), so whoever reads the lines believes nothing in them,
and tells it nothing before it is due: what runs in a visible case could say what it knows of a hidden one.

The first line is the job: `{"cells": [[name, source]], "names": [...], "num_ranks", "case_s", "start_s", "limits":
{"data": bytes, "nproc": threads, "fsize": bytes}}`. It is answered by `{"ready": true}` when the ranks are up and
before they know anything of the answer, or `{"failed": why}`. Each further line is a case, `{"trial", "members",
"inputs", "prepare", "patience"}`, answered by `{"index": i, "observation": {...}}`; the next may be sent after that.
"""

import json
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from labkit.cluster import start
from labkit.errors import LabError
from labkit.exercise import Case, Observation
from labkit.trial.running import Answer, observe

__all__ = ["MAX_LINE_BYTES", "case_line", "job", "main"]

# So much one case may say; more is not sent, and not read.
MAX_LINE_BYTES = 8 << 20

_LIMITS = {"data": resource.RLIMIT_DATA, "fsize": resource.RLIMIT_FSIZE, "nproc": resource.RLIMIT_NPROC}


def job(answer: Answer, *, num_ranks: int, case_s: float, start_s: float, limits: Mapping[str, int]) -> bytes:
    """The first line that the arena reads."""
    told = {"cells": answer.cells, "names": answer.names, "num_ranks": num_ranks, "case_s": case_s, "start_s": start_s}
    return json.dumps({**told, "limits": dict(limits)}).encode() + b"\n"


def case_line(case: Case) -> bytes:
    """A case as the arena reads it: only what a trial needs, not its name or what it is worth."""
    told = {"trial": case.trial, "members": list(case.members), "inputs": dict(case.inputs)}
    return json.dumps({**told, "prepare": case.prepare, "patience": case.patience}).encode() + b"\n"


def main() -> None:
    """Try the answer of the job on stdin."""
    # What the answer reads or prints, here or on the ranks, goes nowhere near these: nothing that is started from here
    # inherits them.
    told, channel = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    try:
        task = json.loads(told.readline())
        for name, most in task["limits"].items():
            _limit(_LIMITS[name], most)
        _limit(resource.RLIMIT_CORE, 0)
        ranks = start(task["num_ranks"], backend="gloo", timeout_s=task["start_s"])
    except (LabError, OSError) as error:
        _send(channel, {"failed": f"{type(error).__name__}: {error}"[:2_000]})
        os._exit(1)
    os.dup2(null, 2)
    _send(channel, {"ready": True})
    _try(channel, task, lambda answer: observe(ranks, answer, _cases(told), timeout_s=task["case_s"]))
    ranks.stop()
    os._exit(0)  # nothing that the answer left in this process is waited for


def _cases(told: IO[bytes]) -> Iterator[Case]:
    """The cases, each read when the one before is done."""
    for number, line in enumerate(told):
        one = json.loads(line)
        yield Case(name=f"case {number}", criterion="", **{**one, "members": tuple(one["members"])})


def _try(channel: int, task: Mapping[str, Any], seen: Callable[[Answer], Iterable[Observation]]) -> None:
    answer = Answer(names=tuple(task["names"]), cells=tuple((name, source) for name, source in task["cells"]))
    index = 0
    try:
        for observation in seen(answer):
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
