"""Entries of a class's folder that are no notebooks: each has a row and a reason, or is named once."""

import pytest

from labkit.errors import PlanError
from labkit.grade import submissions
from tests.test_submissions import RING, put, read


def test_other_files_beside_the_submissions_are_named_once(tmp_path):
    put(tmp_path, f"s01/{RING}.ipynb")
    for name in ("answer.py", "s01.zip", "a\nb.pdf", "c.pdf", "d.pdf"):
        (tmp_path / name).write_text("a")
    found = submissions.read(tmp_path)
    assert [(one.student, one.remarks) for one in found.students] == [("s01", ())]
    assert found.notes == ("at the top of the folder, not looked at: a\\nb.pdf, answer.py, c.pdf, d.pdf and 1 more.",)


def test_who_handed_in_no_notebook_is_a_student_with_a_reason(tmp_path):
    put(tmp_path, f"s01/{RING}.ipynb")
    moodle, canvas = "First Last_123456_assignsubmission_file_a.pdf", "lastfirst_4711_98765_answer.py"
    for name in (
        "s10.zip",
        f"s11_{RING}.tar.gz",
        moodle,
        canvas,
        "s12/answer.py",
        "s12/a.pdf",
        "s13/.DS_Store",
        "s14/x.zip",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    said = {
        "s10": "s10.zip is not a notebook: unpack it into a folder.",
        "s11": f"s11_{RING}.tar.gz is not a notebook: unpack it into a folder.",
        "First Last_123456": f"{moodle} is not a notebook: a file NAME.ipynb is.",
        "lastfirst_4711": f"{canvas} is not a notebook: a file NAME.ipynb is.",
        "s12": "no notebook in this folder: it holds a.pdf and answer.py.",
        "s13": "no notebook in this folder, and no other file.",
        "s14": "no notebook in this folder: it holds x.zip; unpack what is packed.",
    }
    found = read(tmp_path)
    assert {student: one.remarks for student, one in found.items()} == {
        "s01": (),
        **{student: (remark,) for student, remark in said.items()},
    }
    assert {student: found[student].handed["06.1"].absent for student in said} == said


def test_what_is_missing_is_named_and_what_is_there(tmp_path):
    put(tmp_path, "s01.ipynb", "def my_ring(x, group):\n    return x")
    put(tmp_path, f"s02_{RING}.ipynb", "def my_ring(x, group):\n    return x")
    put(tmp_path, f"s03_{RING}.ipynb", "def tree_all_reduce(x, group):\n    return x")
    put(tmp_path, f"s04_{RING}.ipynb", "x = 1")
    found = read(tmp_path, ("06.1", "06.2"))
    absent = {student: one.handed["06.1"].absent for student, one in found.items()}
    assert absent == {
        "s01": f"no notebook of chapter 06 was handed in ({RING}.ipynb): there is s01.ipynb.",
        "s02": f"ring_all_reduce is not defined in s02_{RING}.ipynb: it defines my_ring.",
        "s03": f"ring_all_reduce is not defined in s03_{RING}.ipynb: it defines tree_all_reduce.",
        "s04": f"ring_all_reduce is not defined in s04_{RING}.ipynb: it defines no function.",
    }
    assert found["s03"].handed["06.2"].absent.startswith("crossover_bytes and faster are not defined in ")


def test_a_folder_without_a_notebook_is_refused_with_what_is_there(tmp_path):
    for name in ("s10.zip", "s11/answer.py", "notes.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    with pytest.raises(PlanError) as caught:
        read(tmp_path)
    assert str(caught.value).endswith(
        "NAME.ipynb. s10: s10.zip is not a notebook: unpack it into a folder. s11: no notebook in this folder: it "
        "holds answer.py. notes.pdf is none."
    )
