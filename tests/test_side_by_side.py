"""The suite in two processes: what is handed out, what it says, how it ends when a test hangs or a person stops it."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from tests import side_by_side

TIMEOUT_S = 240.0

pytestmark = pytest.mark.timeout(900)
QUICK = """
import pathlib, pytest
@pytest.mark.parametrize("number", range(4))
def test_quick(number):
    with open("ran", "a") as ran:
        ran.write(f"quick{number}\\n")
"""
HANGS = """
import time
def note(word):
    with open("ran", "a") as ran:
        ran.write(word + "\\n")
def test_before():
    note("before")
def test_hangs():
    note("hangs")
    while True:
        time.sleep(1)
def test_after():
    note("after")
def test_wrong():
    note("wrong")
    assert 1 + 1 == 3
"""
WAITS = """
import pathlib, time, uuid
import labkit as lk
def test_waits():
    with lk.cluster.start(1):
        pathlib.Path("up-" + uuid.uuid4().hex).touch()
        time.sleep(600)
"""


def start(folder: pathlib.Path, *arguments: str, mark: str = "", **files: str) -> subprocess.Popen[str]:
    """Pytest on a folder of small files, in two processes and with the hooks of this suite."""
    (folder / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    root = str(pathlib.Path(__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "LABKIT_TEST_MARK": mark, "PYTEST_ADDOPTS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that were started with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LABKIT_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_test_that_hangs_fails_alone_and_every_other_runs_once(tmp_path: pathlib.Path) -> None:
    process = start(tmp_path, "--timeout=3", "--timeout-method=thread", hangs=HANGS, quick=QUICK)
    said, _ = process.communicate(timeout=TIMEOUT_S)
    ran = (tmp_path / "ran").read_text().split()
    assert sorted(ran) == ["after", "before", "hangs", *(f"quick{number}" for number in range(4)), "wrong"], said
    assert process.returncode == 1
    assert "2 failed, 6 passed" in said
    assert re.search(r"^ +\d+:\d\d +\d+%  test_quick\.py: 4 passed in \d+ s$", said, re.MULTILINE), said
    assert re.search(r"^ +\d+:\d\d +\d+%  FAILED test_hangs\.py::test_wrong$", said, re.MULTILINE), said
    assert re.search(r"^ +\d+:\d\d 100%  test_hangs\.py: 2 failed, 2 passed in \d+ s$", said, re.MULTILINE), said
    assert "crashed while running 'test_hangs.py::test_hangs'" in said
    assert re.search(r"^  File .*test_hangs\.py\", line 1[01] in test_hangs$", said, re.MULTILINE), said


@pytest.mark.parametrize("wrong", ["test_nonesuch.py", "test_quick.py::test_nonesuch"])
def test_wrong_arguments_are_said(tmp_path: pathlib.Path, wrong: str) -> None:
    process = start(tmp_path, "-n", "1", wrong, quick=QUICK)
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    assert said.count("ERROR: ") == 1
    assert re.search(rf"^ERROR: .*not found: .*{wrong}", said, re.MULTILINE), said


@pytest.mark.ranks
def test_ctrl_c_ends_both_halves_and_their_ranks(tmp_path: pathlib.Path) -> None:
    mark = uuid.uuid4().hex
    process = start(tmp_path, mark=mark, one=WAITS, other=WAITS)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(tmp_path.glob("up-*"))) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        assert len(marked(mark)) >= 9  # pytest, its two halves, and for each the keeper, the rank and more
        os.killpg(process.pid, signal.SIGINT)
        process.wait(TIMEOUT_S)
        assert process.returncode == pytest.ExitCode.INTERRUPTED
        while left := marked(mark):
            assert time.monotonic() < deadline + TIMEOUT_S, left
            time.sleep(0.1)
    finally:
        for one in marked(mark):
            one.kill()
        process.communicate(timeout=TIMEOUT_S)


def test_what_shares_something_goes_together() -> None:
    scopes = {
        "tests/ranks/test_px.py::test_one[a::b]": "tests/ranks/test_px.py",
        "labkit/spec/model.py::labkit.spec.model.Model": "labkit/spec/model.py",
        "tests/grade/test_sandbox.py::test_one": "tests/grade/",
        "tests/grade/test_batch.py::test_one": "tests/grade/",
        "tests/notebooks/test_notebooks.py::test_runs[x]": "tests/notebooks/test_notebooks.py::test_runs[x]",
    }
    assert {nodeid: side_by_side.scope_of(nodeid) for nodeid in scopes} == scopes
