"""Cases of an exercise run on live ranks: each ends within its time, and the ranks are whole again after it."""

import contextlib
import inspect
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.cluster import Call, Ranks
from labkit.errors import Failure, LabError, PlanError, RankError, RankLost, RankTimeout, ranks_text
from labkit.exercise import Case, Observation
from labkit.trial.places import Places
from labkit.trial.waiting import FINISHED, waits_of

__all__ = ["Answer", "observe"]

ATTEMPT = "labkit.rank.trials.attempt:attempt"
# After so many cases that hung or lost a rank, the rest would do the same, at the same price.
MAX_BROKEN = 2
# When one rank failed, the others are looked at so often, and freed when they have done nothing for so long.
LOOK_S = 0.1
WAITED_S = 0.25
NUM_SETTLING = 4
# A rank that is not free after this long does not want to be: it is restarted.
FREEING_S = 5.0
MAX_MESSAGE_CHARS = 400
# What a trial needs is loaded within this time, however busy the machine is.
PREPARE_S = 120.0

# What a rank raises because another one left, and torch's own report of where in C++ it was raised.
_CONSEQUENCE = re.compile(
    r"gloo/transport|Connection (?:closed|reset) by peer|Broken pipe|Socket (?:closed|Timeout)|"
    r"NCCL communicator was aborted|remote process exited",
    re.IGNORECASE,
)
_REPORT = re.compile(r"\s*Exception raised from .*", re.DOTALL)
_SOURCE = re.compile(r"\[[^\]]*\.(?:cc|cpp|h):\d+\] | at 0x[0-9a-f]+")
_LAST_FRAME = re.compile(
    r'^  (?:File "(?P<file>[^"\n]+)"|[^"\n]+?), line \d+, in [^\n]*\n(?P<source>[^\n]*)', re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a learner handed in: functions of this notebook, or cells whose text defines them.

    Attributes:
        names: the functions that the exercise asks for.
        functions: them, as far as they are here.
        cells: name and source of cells that define them on the ranks, and never here.
    """

    names: tuple[str, ...]
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    cells: tuple[tuple[str, str], ...] = ()

    @property
    def places(self) -> Places:
        """The lines of the answer."""
        unwrapped = (inspect.unwrap(getattr(one, "func", one)) for one in self.functions.values())
        codes = (getattr(one, "__code__", None) for one in unwrapped)
        return Places(dict(self.cells), [code.co_filename for code in codes if code is not None])


def observe(ranks: Ranks, answer: Answer, cases: Iterable[Case], *, timeout_s: float) -> Iterator[Observation]:
    """Try an answer case by case; yields one observation for each, whatever the answer does.

    Args:
        ranks: live ranks, idle; enough for the members of every case. They are idle again after each case: waiting
            ranks are freed, those that cannot be freed or that ended are restarted.
        answer: what to try.
        cases: what to try it on.
        timeout_s: the most that one case may take, times its patience.

    Raises:
        ClusterError: the ranks themselves broke.
        RankError: what a case needs cannot be loaded.
    """
    num_broken = 0
    for case in cases:
        if num_broken == MAX_BROKEN:
            yield Observation(outcome="skipped", message=f"not tried: {MAX_BROKEN} cases before it hung or crashed.")
            continue
        if case.prepare:
            ranks.run(case.prepare, timeout_s=PREPARE_S)
        began_s = time.monotonic()
        try:
            seen = _observe(ranks, answer, case, timeout_s * case.patience)
        except KeyboardInterrupt:  # the stop button: nothing of the case goes on behind it
            with contextlib.suppress(LabError):
                _settle(ranks)
            raise
        num_broken += seen.outcome in ("timeout", "lost")
        yield replace(seen, seconds=time.monotonic() - began_s)


def _observe(ranks: Ranks, answer: Answer, case: Case, timeout_s: float) -> Observation:
    try:
        call = ranks.run(
            ATTEMPT,
            block=False,
            functions=dict(answer.functions),
            cells=answer.cells,
            names=answer.names,
            trial=case.trial,
            members=case.members,
            inputs=dict(case.inputs),
        )
        if not _wait(ranks, call, timeout_s):
            return _cut_off(ranks, answer, case, call, timeout_s)
        return _returned(call.result(), case)
    except RankLost as error:
        _settle(ranks, error.lost)
        return Observation(outcome="lost", message=_ended(error))
    except RankError as error:
        _settle(ranks)
        return _raised(error, answer.places)
    except PlanError as error:  # a function that cannot be sent to the ranks
        return Observation(outcome="raised", message=_one_line(str(error)))


def _wait(ranks: Ranks, call: Call, timeout_s: float) -> bool:
    """Wait for a call; where one rank failed, those that only wait for it are freed at once."""
    deadline = time.monotonic() + timeout_s
    while not call.wait(max(1e-3, min(LOOK_S, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
        if call.failed() and _only_waits(ranks, call.pending()):
            _settle(ranks)
    return True


def _only_waits(ranks: Ranks, pending: list[int]) -> bool:
    """Whether all of them wait, and none for the rendezvous store, which answers when the machine has a core for it."""
    waited_s = ranks.waiting_s(pending, timeout_s=LOOK_S)
    if any(waited_s.get(rank, 0.0) < WAITED_S for rank in pending):
        return False
    stacks = ranks.stacks(pending, timeout_s=LOOK_S)
    return not any(frame.startswith("new_group (") for rank in pending for frame in stacks.get(rank, ["new_group ("]))


def _settle(ranks: Ranks, lost: Iterable[int] = ()) -> None:
    """Make the ranks idle and whole: free them, restart those that ended, whatever an answer left behind in them."""
    for left in reversed(range(NUM_SETTLING)):
        try:
            for rank in lost:
                ranks.restart(rank)
            ranks.interrupt(force=True, timeout_s=FREEING_S)
            return
        except (RankLost, RankTimeout) as error:  # some end late, others begin to do something on the way
            if not left:
                raise
            lost = error.lost if isinstance(error, RankLost) else error.missing


def _cut_off(ranks: Ranks, answer: Answer, case: Case, call: Call, timeout_s: float) -> Observation:
    late = [rank for rank in case.members if rank in call.pending()] or call.pending()
    waits = waits_of(ranks.stacks(late), sorted(late), answer.places)
    _settle(ranks)
    at_work = [wait.rank for wait in waits if wait.doing != FINISHED] or sorted(late)
    message = f"{ranks_text(at_work)} did not finish within {timeout_s:g} s."
    return Observation(outcome="timeout", message=message, waits=waits)


def _returned(texts: list[Any], case: Case) -> Observation:
    try:
        by_rank = [dict(json.loads(texts[rank])) for rank in case.members]
        missing = sorted({str(name) for told in by_rank for name in told.get("missing", ())})
    except (TypeError, ValueError, RecursionError) as error:
        message = f"what came back from the ranks is not what a trial gives ({type(error).__name__})."
        return Observation(outcome="raised", message=message)
    if missing:
        return Observation.missing(missing)
    return Observation(outcome="returned", values=tuple(told.get("value") for told in by_rank))


def _raised(error: RankError, places: Places) -> Observation:
    """The lowest rank's failure tells, unless it came of another rank's."""
    causes = {rank: one for rank, one in error.failures.items() if not _CONSEQUENCE.search(one.message)}
    causes = causes or error.failures
    rank, failure = min(causes.items())
    if _is_stub(failure, places):
        return Observation(outcome="unsolved", message=_one_line(failure.message) or "not written yet.")
    others = len(causes) - 1
    on = f"rank {rank}" if not others else f"rank {rank} (and {others} more)"
    text = _one_line(str(failure)).removesuffix(".")
    return Observation(outcome="raised", message=f"{text} on {on}.", where=places.innermost(failure.traceback))


def _is_stub(failure: Failure, places: Places) -> bool:
    """Whether the answer itself raised NotImplementedError: torch does so too, for what it cannot do."""
    if failure.type != "NotImplementedError":
        return False
    frames = list(_LAST_FRAME.finditer(failure.traceback))
    ours = bool(frames) and (frames[-1]["file"] is None or bool(places.name(frames[-1]["file"])))
    return ours and frames[-1]["source"].strip().startswith("raise ")


def _one_line(text: str) -> str:
    """A message without addresses and without where in C++ it was raised: one line, cut to what a reader takes in."""
    text = " ".join(_SOURCE.sub("", _REPORT.sub("", text)).split())
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]} ..."


def _ended(error: RankLost) -> str:
    if error.signal == "SIGABRT":
        why = "gloo ends a process so when a message is larger than the buffer that receives it"
        return f"the process of {ranks_text(error.lost)} was killed by SIGABRT: {why}."
    if error.signal:
        return f"the process of {ranks_text(error.lost)} was killed by {error.signal}."
    return f"the process of {ranks_text(error.lost)} ended from inside."
