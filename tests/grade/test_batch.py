"""A class of twelve, nine of them trouble: each gets exactly its row, and nothing is left."""

import contextlib
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from labkit import cli
from tests.grade import twelve

GENEROUS_S = 600
# A shell's background jobs ignore Ctrl-C, and so would what a test starts there.
HEEDS_CTRL_C = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from labkit.cli import main; sys.exit(main())"
)
OPTIONS = ("--questions", "06.1", "--timeout", "4", "--jobs", "2", "--seed", "3")


def processes():
    return {one.pid for one in psutil.Process().children(recursive=True)}


def report_of(out):
    text = (out / "results.json").read_text()
    return {one["student"]: one for one in json.loads(text)["students"]}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.timeout(GENEROUS_S)
def test_each_of_twelve_gets_exactly_its_row(tmp_path, repository, capsys):
    before = processes()
    twelve.write(tmp_path / "class", repository)
    arguments = ["grade", str(tmp_path / "class"), "--out", str(tmp_path / "report"), *OPTIONS]
    assert cli.main(arguments, {}) == 0
    said = capsys.readouterr()
    rows = report_of(tmp_path / "report")
    got = {name: (row["results"][0]["status"], row["results"][0]["score"]) for name, row in rows.items()}
    assert got == twelve.EXPECTED, {name: row["results"][0]["message"] for name, row in rows.items()}
    assert processes() == before
    assert "ring_all_reduce is defined in cells 4 and 5: cell 5 counts." in rows["s09"]["results"][0]["notes"]
    assert "cannot be read: it is not JSON" in rows["s11"]["results"][0]["message"]
    assert said.err.count("\n") == 12
    for student, (status, score) in twelve.EXPECTED.items():
        assert f"\n{student}      {score:>2} {status}" in said.out
    names = {path.relative_to(tmp_path / "report").as_posix() for path in (tmp_path / "report").rglob("*")}
    assert {"index.html", "scores.csv", "results.json"} <= names
    assert {f"students/{student}.html" for student in rows} <= names
    assert {f"gradescope/{student}/results.json" for student in rows} <= names
    _nothing_runs_again(arguments, tmp_path / "report", capsys, said.out)


def _nothing_runs_again(arguments, out, capsys, table):
    """The same command finds every result."""
    kept = {path: path.stat().st_mtime_ns for path in (out / ".results").iterdir()}
    assert len(kept) == 12
    began = time.monotonic()
    assert cli.main(arguments, {}) == 0
    said = capsys.readouterr()
    assert said.out == table
    assert said.err == ""
    assert {path: path.stat().st_mtime_ns for path in (out / ".results").iterdir()} == kept
    assert time.monotonic() - began < GENEROUS_S


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.timeout(GENEROUS_S)
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_batch_keeps_what_is_done_and_leaves_nothing(tmp_path, repository, ending):
    twelve.write(tmp_path / "all", repository)
    (tmp_path / "class").mkdir()
    for student, name in (("s10", "s01"), ("s03", "s02")):  # the first needs no ranks, the second never ends
        (tmp_path / "all" / f"{student}_{twelve.CHAPTER}.ipynb").rename(tmp_path / "class" / f"{name}.ipynb")
    command = [sys.executable, "-c", HEEDS_CTRL_C, "grade", str(tmp_path / "class"), "--out", str(tmp_path / "report")]
    process = subprocess.Popen(
        [*command, "--questions", "06.1", "--timeout", "80"],
        cwd=repository,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        below = _running_answer(process)
        process.send_signal(ending)
        _, said = process.communicate(timeout=GENEROUS_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    _, left = psutil.wait_procs(below, timeout=60)
    assert not left
    assert len(list((tmp_path / "report" / ".results").glob("*.json"))) == 1
    if ending == signal.SIGINT:
        assert process.returncode == 130
        last = "labkit: stopped; 1 of 2 results are kept, and no report of them is written yet: "
        last += "the same command goes on from here and writes it."
        assert said.splitlines()[-1] == last
        assert "Traceback" not in said


def _running_answer(process):
    """Wait until ranks are up in a sandbox below a process; returns all that runs there."""
    deadline = time.monotonic() + GENEROUS_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(process.pid).children(recursive=True)
            if len(found) > 6:
                return found
        time.sleep(0.1)
    raise AssertionError("no answer ran")
