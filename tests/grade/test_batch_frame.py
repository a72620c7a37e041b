"""The frame of a batch: kept results, one batch at a time, progress, failures of the grader. No answer is run."""

import fcntl
import io
import json
import os
import stat

import pytest

from labkit import cli
from labkit.errors import ClusterError, LabError, PlanError
from labkit.exercise import Result
from labkit.grade import batch
from labkit.grade.progress import Bar, Progress
from labkit.grade.sandbox import Sandbox

RING = "06_ring_and_tree"
ANSWER = "def ring_all_reduce(x, group):\n    return x"


@pytest.fixture
def graded(monkeypatch):
    """The grader replaced by one that writes down what it is asked; answers that say `broken` break it."""
    asked = []

    def grade(exercise, answer, *, seed, sandbox, limits, notes):
        source = "".join(text for _, text in answer.cells)
        asked.append((exercise.question, source, seed))
        if "broken" in source:
            raise ClusterError("ranks did not start.")
        if "stop" in source:
            raise KeyboardInterrupt
        return Result(
            question=exercise.question, title="t", status="full", score=10, max_score=10, message="m", notes=notes
        )

    monkeypatch.setattr(batch, "grade", grade)
    monkeypatch.setattr(batch, "choose", lambda no_sandbox: Sandbox(program="", words="none"))
    return asked


def put(folder, name, source=ANSWER):
    folder.mkdir(exist_ok=True)
    cells = [{"cell_type": "code", "source": source}]
    (folder / f"{name}_{RING}.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))


def run(tmp_path, **options):
    return batch.run(tmp_path / "class", tmp_path / "out", questions=["06.1"], **options)


def test_only_what_changed_is_graded_again(tmp_path, graded):
    put(tmp_path / "class", "s01")
    put(tmp_path / "class", "s02")
    first = run(tmp_path)
    assert len(graded) == 2
    assert run(tmp_path).gradebook == first.gradebook
    assert len(graded) == 2
    put(tmp_path / "class", "s02", ANSWER + " + 0")
    put(tmp_path / "class", "s03")
    run(tmp_path)
    assert [source for _, source, _ in graded[2:]] == [f"{ANSWER} + 0\n", f"{ANSWER}\n"]
    run(tmp_path, seed=1)
    assert len(graded) == 7
    results = list((tmp_path / "out" / ".results").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in results} == {0o600}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


@pytest.mark.parametrize("content", ["", "{", "[]", '{"question": "06.1"}', '{"idea": null, "cases": [{}]}'])
def test_a_kept_result_that_is_damaged_is_made_anew(tmp_path, graded, content):
    put(tmp_path / "class", "s01")
    run(tmp_path)
    (kept,) = (tmp_path / "out" / ".results").iterdir()
    kept.write_text(content)
    run(tmp_path)
    assert len(graded) == 2


def test_a_failure_of_the_grader_ends_one_answer_and_is_not_kept(tmp_path, graded, capsys):
    put(tmp_path / "class", "s01", ANSWER + "  # broken")
    put(tmp_path / "class", "s02")
    for count in (2, 3):
        arguments = ["grade", str(tmp_path / "class"), "--out", str(tmp_path / "out"), "--questions", "06.1"]
        assert cli.main(arguments, {}) == 1
        said = capsys.readouterr()
        assert said.err.splitlines()[-1] == "labkit: s01 06.1 was not graded: ranks did not start."
        assert "s01: 06.1 was not graded, by no fault of the answer: grade the folder again." in said.out
        assert len(graded) == count
    done = run(tmp_path)
    assert done.gradebook.results["s01", "06.1"].status == "error"
    assert done.gradebook.results["s02", "06.1"].status == "full"


def test_an_interrupt_says_how_to_go_on(tmp_path, graded, capsys):
    put(tmp_path / "class", "s01")
    put(tmp_path / "class", "s02", ANSWER + "  # stop")
    assert (
        cli.main(["grade", str(tmp_path / "class"), "--out", str(tmp_path / "out"), "--questions", "06.1"], {}) == 130
    )
    said = capsys.readouterr()
    assert said.err.endswith(
        "labkit: stopped; 1 of 2 results are kept, and no report of them is written yet: the same command goes on from "
        "here and writes it.\n"
    )
    assert not (tmp_path / "out" / "index.html").exists()


def test_two_batches_do_not_share_a_folder(tmp_path, graded):
    put(tmp_path / "class", "s01")
    run(tmp_path)
    handle = os.open(tmp_path / "out" / ".lock", os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(LabError, match="another batch writes to"):
            run(tmp_path)
    finally:
        os.close(handle)
    run(tmp_path)


def test_a_report_among_the_submissions_is_refused(tmp_path, graded):
    put(tmp_path / "class", "s01")
    for out in (tmp_path / "class", tmp_path / "class" / "report"):
        with pytest.raises(PlanError, match="would lie among the submissions"):
            batch.run(tmp_path / "class", out)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be a folder to write to"):
        batch.run(tmp_path / "class", tmp_path / "file")
    with pytest.raises(PlanError, match="jobs=0"):
        run(tmp_path, jobs=0)


@pytest.mark.parametrize("blocked", [".results", "index.html"])
def test_a_report_that_cannot_be_written_is_one_line(tmp_path, graded, capsys, blocked):
    put(tmp_path / "class", "s01")
    out = tmp_path / "out"
    (out / "index.html" if blocked == "index.html" else out).mkdir(parents=True)
    if blocked == ".results":
        (out / blocked).write_text("")
    assert cli.main(["grade", str(tmp_path / "class"), "--out", str(out), "--questions", "06.1"], {}) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"labkit: the report in {out} cannot be written: ")
    assert str(out / blocked) in last


def test_what_a_killed_batch_was_writing_is_cleared_away(tmp_path, graded):
    put(tmp_path / "class", "s01")
    run(tmp_path)
    (tmp_path / "out" / ".results" / ".0123.json.abcd.draft").write_text("{")
    run(tmp_path)
    assert len(list((tmp_path / "out" / ".results").iterdir())) == 1


def test_the_report_of_a_class_is_written(tmp_path, graded):
    put(tmp_path / "class", "s01")
    done = run(tmp_path, jobs=3)
    assert done.page == tmp_path / "out" / "index.html"
    assert json.loads((tmp_path / "out" / "results.json").read_text())["students"][0]["score"] == 10


def test_a_report_on_some_questions_says_so_and_a_student_without_a_notebook_has_a_row(tmp_path, graded, capsys):
    put(tmp_path / "class", "s01")
    for name in ("s02.zip", "answer.py"):
        (tmp_path / "class" / name).write_text("")
    arguments = ["grade", str(tmp_path / "class"), "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--questions", "06.1"], {}) == 0
    said = capsys.readouterr().out
    for line in (
        "s02.zip is not a notebook: unpack it into a folder.",
        "note: at the top of the folder, not looked at: answer.py.",
        "note: this report covers 06.1 alone: results of other questions are kept, and a run without --questions shows",
    ):
        assert line in said
    plain = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(one["student"], one["question"]) for one in plain["remarks"]] == [("", ""), ("", ""), ("s02", "")]
    result = plain["students"][1]["results"][0]
    assert (result["status"], result["score"], result["idea"]) == ("missing", 0, None)
    assert result["message"] == "s02.zip is not a notebook: unpack it into a folder."
    assert "All: at the top of the folder" in (tmp_path / "out" / "index.html").read_text()
    assert len(graded) == 1
    cli.main(arguments, {})
    assert "this report covers" not in capsys.readouterr().out


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True


def test_progress_is_one_line_on_a_terminal_and_lines_elsewhere():
    begun = Progress(num_done=2, num_total=8, num_kept=1, elapsed_s=10.0, running=(("s03", "06.1"), ("s04", "06.1")))
    assert str(begun) == "█████░░░░░░░░░░░░░░░ 2/8 25% · 0:10 · about 1:00 left · s03 06.1 (and 1 more)"
    ended = Progress(num_done=8, num_total=8, num_kept=1, elapsed_s=75.0, finished="s04 06.1: full, 10 of 10")
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        bar = Bar(stream)
        bar(begun)
        bar(ended)
        bar.end()
    assert terminal.getvalue().count("\r") == 2
    assert terminal.getvalue().endswith("\n")
    assert log.getvalue() == "8/8 1:15 s04 06.1: full, 10 of 10\n"
