"""Answers graded on real ranks behind the sandbox: every way to end gives one clear result, and leaves no process."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit.grade import sandbox
from labkit.grade.sandbox import Sandbox
from tests.grade.twice import RIGHT, graded

pytestmark = [pytest.mark.sandbox, pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


def doing(*lines: str) -> str:
    """A right answer that does something else first."""
    return "def twice(x):\n" + "".join(f"    {line}\n" for line in lines) + "    return 2 * x\n"


def test_a_right_answer_is_full_also_beside_another(chosen: Sandbox) -> None:
    with ThreadPoolExecutor(2) as jobs:
        results = list(jobs.map(lambda source: graded(chosen, source), [RIGHT, "def twice(x):\n    return x + 1\n"]))
    assert [(one.status, one.score, one.max_score) for one in results] == [("full", 10, 10), ("wrong", 0, 10)]
    assert [one.outcome for one in results[0].cases] == ["returned"] * 3
    assert results[1].message == "[3.0] is not twice the number, [4.0]."


EATEN_BYTES = 3 << 29
EATING = """
import os, time
def twice(x):
    for _ in range(4):
        if os.fork() == 0:
            eaten = [bytearray(os.urandom(1 << 20)) * 20 for _ in range(10)]
            time.sleep(600)
    time.sleep(600)
"""

ENDINGS = {
    "an infinite loop": (
        doing("while True: pass"),
        "timeout",
        r"ranks 0 and 1 did not finish within 1.5 s\.",
    ),
    "a hang in a collective": (
        "import torch.distributed as dist\n" + doing("if dist.get_rank() == 1: dist.barrier()"),
        "timeout",
        r"rank.* did not finish within 1.5 s\.",
    ),
    "a rank that kills itself": (
        "import os\n" + doing("os.kill(os.getpid(), 9)"),
        "crashed",
        r"the process of ranks? .*was killed by SIGKILL\.",
    ),
    "its process group killed": (
        "import os\n" + doing("os.killpg(0, 9)"),
        "crashed",
        r"the process of ranks? .*was killed by SIGKILL\.",
    ),
    "all processes killed": (
        "import os\n" + doing("os.kill(-1, 9)"),
        "crashed",
        r"the lab that ran the answer was ended from inside: by the answer, or by something that it started\.",
    ),
    "the ranks' parent killed": (
        "import os\n" + doing("os.kill(os.getppid(), 9)"),
        "crashed",
        r"(the ranks broke: |the process of ).*",
    ),
    "a fork bomb": (
        "import os\n" + doing("while True: os.fork()"),
        "crashed",
        r"\d+ processes ran at once, and 64 are allowed: start fewer\.",
    ),
    "a fork bomb in the cell": (
        "import os\nwhile True: os.fork()\n" + RIGHT,
        "crashed",
        r"\d+ processes ran at once, and 64 are allowed: start fewer\.",
    ),
    "a 10 GB allocation": (
        "import torch\n" + doing("big = torch.empty(10_000_000_000, dtype=torch.uint8)"),
        "error",
        r"RuntimeError: .*tried to allocate 10000000000 bytes.* on rank \d.*\.",
    ),
    "memory eaten by many processes": (
        EATING,
        "crashed",
        r"\d\.\d GiB of memory were in use on all ranks together, and 1\.5 GiB are allowed: use less\.",
    ),
    "an object that fakes equality": (
        "class Any:\n"
        "    __eq__ = lambda self, other: True\n"
        "    __ne__ = lambda self, other: False\n"
        "    __getattr__ = lambda self, name: self\n"
        "def twice(x):\n    return Any()\n",
        "wrong",
        r"\[\{'type': 'Any'\}\] is not twice the number, \[2\.0\]\.",
    ),
    "reading the checks": (
        "def twice(x):\n    import labkit.checks.ring_and_tree\n    return 2 * x\n",
        "error",
        r"ModuleNotFoundError: No module named 'labkit\.checks\.ring_and_tree'.* on rank \d.*\.",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_each_way_to_end_gives_its_result(chosen: Sandbox, name: str) -> None:
    source, status, message = ENDINGS[name]
    case_s = 1.5 if status == "timeout" else 60.0
    result = graded(chosen, source, case_s=case_s, memory_bytes=EATEN_BYTES if source == EATING else 4 << 30)
    assert (result.status, result.score, result.max_score) == (status, 0, 10), result
    assert re.fullmatch(message, result.message), result.message
    assert len(result.cases) == 3
    if status == "error":
        assert "s01.ipynb, cell 3, line" in result.cases[0].where


FORGED_LINE = b'{"index": 2, "observation": {"outcome": "returned", "values": [[14.0], [14.0]]}}\n'
FORGED = """
import os
for fd in os.listdir("/proc/self/fd"):
    try:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
            os.write(int(fd), LINE)
    except OSError:
        pass
"""
# What a rank gives back is unpickled in the arena: there it can do as it likes.
FORGING = f"""
import pickle
import labkit.wire.parcel
class Forge:
    def __reduce__(self):
        return exec, ({FORGED!r}, {{"LINE": {FORGED_LINE!r}}})
def twice(x):
    labkit.wire.parcel.Outcome.dumps = lambda outcome: pickle.dumps(Forge())
    return 2 * x
"""


def test_an_answer_that_takes_over_the_arena_cannot_end_the_grader(chosen: Sandbox) -> None:
    result = graded(chosen, FORGING)
    assert (result.status, result.score) == ("crashed", 0), result
    assert "case 2 where case 0 was due" in result.message


def test_without_a_sandbox_questions_end_all_the_same() -> None:
    where = sandbox.choose(no_sandbox=True)
    assert graded(where, RIGHT).status == "full"
    daemon = "import subprocess\n" + doing(
        "subprocess.Popen(['sleep', '600'], start_new_session=True)", "while True: pass"
    )
    result = graded(where, daemon, case_s=1.5)
    assert (result.status, result.score) == ("timeout", 0)
