"""What comes out of a sandbox may be anything: a program in the place of the arena says it, and no ranks are needed."""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest

from labkit.errors import LabError, PlanError
from labkit.exercise import Result
from labkit.grade import question
from labkit.grade.limits import Limits
from labkit.grade.question import grade
from labkit.grade.sandbox import Box, Sandbox
from labkit.trial import Answer
from tests.grade.twice import RIGHT, TWICE, graded

pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("nothing_left")]


def line(index: object, value: object = (2.0,), **fields: object) -> str:
    seen = {"outcome": "returned", "values": [value, value], **fields}
    return json.dumps({"index": index, "observation": seen})


READY = '{"ready": true}'
FIRST, SECOND, THIRD = (
    line(0),
    json.dumps({"index": 1, "observation": {"outcome": "returned", "values": [[4.0]] * 4}}),
    line(2, (14.0,)),
)


def says(*lines: str, then: str = "") -> tuple[str, ...]:
    code = f"import os, sys, time\nfor line in {list(lines)!r}: sys.stdin.readline(); print(line, flush=True)\n{then}"
    return (sys.executable, "-c", code)


def told(where: Sandbox, monkeypatch: pytest.MonkeyPatch, program: Sequence[str], **limits: float) -> Result:
    monkeypatch.setattr(question, "ARENA", program)
    return graded(where, RIGHT, **limits)


def test_what_the_arena_says_is_marked(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    result = told(chosen, monkeypatch, says(READY, FIRST, SECOND, THIRD, then="time.sleep(600)"))
    assert (result.status, result.score, result.message) == ("full", 10, "3 cases passed.")


# Answers every case with all that it has been told so far.
TELLS = f"""
import json, os
read = os.read(0, 1 << 20)
print({READY!r}, flush=True)
for index in range(3):
    read += os.read(0, 1 << 20)
    seen = {{"outcome": "raised", "message": read.decode()}}
    print(json.dumps({{"index": index, "observation": seen}}), flush=True)
"""


def test_a_case_is_told_when_those_before_it_are_done(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    result = told(chosen, monkeypatch, (sys.executable, "-c", TELLS))
    known = [one.message for one in result.cases]
    assert [text.count('"trial"') for text in known] == [1, 2, 3]
    assert ["[[7]]" in text for text in known] == [False, False, True]  # the number that is drawn


def test_one_that_never_reads_holds_nobody_up(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = f"for line in {[READY, FIRST, SECOND, THIRD]!r}: print(line, flush=True)"
    monkeypatch.setattr(question, "ARENA", (sys.executable, "-c", deaf))
    assert graded(chosen, RIGHT + "#" * (4 << 20)).status == "full"


HOSTILE = {
    "not JSON": "ready?",
    "another line": "{}",
    "no object": "[]",
    "a number": "7",
    "no observation": '{"index": 0}',
    "another index": line(1),
    "a negative index": line(-1),
    "an index that is true": line(True),
    "an index that is a text": line("0"),
    "more fields": '{"index": 0, "observation": {"outcome": "returned"}, "score": 10}',
    "a field that does not exist": line(0, passed=True),
    "an outcome that does not exist": line(0, outcome="full"),
    "an outcome that is a list": line(0, outcome=["returned"]),
    "NaN seconds": line(0, seconds=float("nan")),
    "endless seconds": line(0, seconds=float("inf")),
    "a huge number": '{"index": 0, "observation": {"outcome": "returned", "seconds": ' + "9" * 5000 + "}}",
    "deep nesting": '{"index": 0, "observation": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "deep objects": '{"a":' * 100_000,
    "a rank that does not exist": line(0, waits=[{"rank": 10**30}]),
    "a text that is a number": line(0, message=7),
    "half a character": r'{"index": 0, "observation": {"outcome": "raised", "message": "\ud800"}}',
}


# Says that it is ready, then the text of the answer's first cell.
ECHO = f"""
import json, sys
print({READY!r}, flush=True)
print(json.loads(sys.stdin.readline())["cells"][0][1], flush=True)
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_line_ends_the_question(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(question, "ARENA", (sys.executable, "-c", ECHO))
    echoed = Answer(names=(), cells=(("cell", HOSTILE[name]),))
    result = grade(TWICE, echoed, seed=7, sandbox=chosen)
    assert (result.status, result.score) == ("crashed", 0)
    assert result.message.startswith("what came out of the sandbox is not what the lab writes there (")
    assert len(result.message) < 300


@pytest.mark.parametrize("again", [FIRST, "nonsense"])
def test_a_forged_line_takes_back_what_was_said_before(
    chosen: Sandbox, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    result = told(chosen, monkeypatch, says(READY, FIRST, again))
    assert (result.status, result.score) == ("crashed", 0)
    assert [one.outcome for one in result.cases] == ["lost"] * 3


def test_more_bytes_than_a_line_may_have_are_not_kept(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    result = told(chosen, monkeypatch, says(READY, then="while True: sys.stdout.write('x' * 65536)"))
    assert (result.status, result.message) == ("crashed", "more than 8388608 bytes came in one line.")


def test_what_was_seen_before_the_time_was_over_counts(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    program = says(READY, FIRST, SECOND, then="time.sleep(600)")
    result = told(chosen, monkeypatch, program, question_s=1.0)
    assert (result.status, result.score) == ("partial", 4)
    assert [one.outcome for one in result.cases] == ["returned", "returned", "timeout"]
    assert result.message == "all cases together did not finish within 1 s."


def test_what_was_seen_before_the_arena_ended_counts(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    result = told(chosen, monkeypatch, says(READY, FIRST))
    assert (result.status, result.score) == ("crashed", 0)
    assert [(one.outcome, one.passed) for one in result.cases] == [("returned", True), ("lost", False), ("lost", False)]
    assert result.message.startswith("the lab that ran the answer was ended from inside")
    assert result.cases[2].message.startswith("not tried any more: ")


def test_the_watch_counts_processes(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    many = "for _ in range(8): os.fork() or time.sleep(600)\ntime.sleep(600)"
    result = told(chosen, monkeypatch, says(READY, then=many), num_processes=5)
    assert result.status == "crashed"
    assert re.fullmatch(r"\d+ processes ran at once, and 5 are allowed: start fewer\.", result.message)


def test_pages_that_processes_share_count_once(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = (
        "held = bytearray(os.urandom(1 << 20)) * 100\nfor _ in range(8):\n    if os.fork() == 0: time.sleep(600)\n"
    )
    rest = f"time.sleep(1)\nfor line in {[FIRST, SECOND, THIRD]!r}: print(line, flush=True)\ntime.sleep(600)"
    program = says(READY, then=sharing + rest)
    assert told(chosen, monkeypatch, program, memory_bytes=400 << 20).status == "full"
    result = told(chosen, monkeypatch, program, memory_bytes=50 << 20)
    assert re.fullmatch(r"0\.\d GiB of memory were in use on all ranks together, and 0\.0 GiB .*", result.message)


# -- what is no fault of the answer ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Counted:
    """A sandbox that counts its boxes, and runs another program in the first ones."""

    real: Sandbox
    first: Sequence[Sequence[str]] = ()
    count: int = 0

    def run(self, argv: Sequence[str], stdin: bytes) -> AbstractContextManager[Box]:
        program = self.first[self.count] if self.count < len(self.first) else argv
        self.count += 1
        return self.real.run(program, stdin)

    def num_threads_beside(self) -> int:
        return self.real.num_threads_beside()


FAILS = {
    "said": (says('{"failed": "ClusterError: no memory"}'), "ClusterError: no memory"),
    "a word on stderr": ((sys.executable, "-c", "import sys; sys.exit('no such library')"), "no such library"),
    "without a word": ((sys.executable, "-c", ""), "it ended without a word"),
    "nonsense": (says("hello"), "Expecting value"),
    "late": ((sys.executable, "-c", "import time; time.sleep(600)"), "they were not up within 1 s"),
}


@pytest.mark.parametrize("how", FAILS)
def test_ranks_that_do_not_start_are_no_zero(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    program, why = FAILS[how]
    counted = Counted(chosen)
    with pytest.raises(LabError, match=rf"ranks could not be started to try an answer, 2 times: .*{why}"):
        told(counted, monkeypatch, program, start_s=1.0 if how == "late" else 60.0)
    assert counted.count == 2


def test_ranks_that_start_the_second_time_are_good(chosen: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(chosen, first=[FAILS["without a word"][0]])
    assert told(counted, monkeypatch, says(READY, FIRST, SECOND, THIRD)).status == "full"


@pytest.mark.parametrize("cells", [(), (("s01.ipynb, cell 3", "def other(x):\n    return x\n"),)])
def test_a_missing_answer_starts_nothing(chosen: Sandbox, cells: tuple) -> None:
    counted = Counted(chosen)
    missing = Answer(names=("twice",), cells=cells)
    result = grade(TWICE, missing, seed=7, sandbox=counted, notes=("the cell of 00.1 is not there",))
    assert (result.status, result.score, result.max_score) == ("missing", 0, 10)
    assert result.message == "twice is not defined."
    assert result.notes == ("the cell of 00.1 is not there",)
    assert counted.count == 0


@pytest.mark.parametrize("wrong", [{"case_s": 0}, {"num_processes": -1}, {"question_s": float("nan")}])
def test_limits_are_above_zero(wrong: dict) -> None:
    with pytest.raises(PlanError, match="must be above 0"):
        Limits(**wrong)
