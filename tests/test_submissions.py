"""Whatever a class hands in is read: who, which notebook, and the statements that define an answer."""

import json
import os

import pytest

from labkit import checks
from labkit.errors import PlanError
from labkit.grade import reading, submissions
from labkit.grade.reading import CodeCell
from labkit.grade.slicing import slice_answer

RING = "06_ring_and_tree"
IMPORTS = "import torch\nimport torch.distributed as dist"
ANSWER = "def ring_all_reduce(x, group):\n    return x.clone()"
STUB = 'def ring_all_reduce(x, group):\n    raise NotImplementedError("Exercise 06.1 is not solved yet")'
SOLVED = [IMPORTS, "ranks = start()", ANSWER]


def notebook(*sources, **fields):
    cells = [{"cell_type": "code", "metadata": {}, "source": one} for one in sources]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5, **fields}


def put(folder, path, *sources, modified_s=None):
    path = folder / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook(*(sources or SOLVED))))
    if modified_s is not None:
        os.utime(path, (modified_s, modified_s))
    return path


def read(folder, questions=("06.1",)):
    return {one.student: one for one in submissions.read(folder, questions).students}


def handed(folder, student="s01"):
    return read(folder)[student].handed["06.1"]


def cells_of(*sources, ids=()):
    return [
        CodeCell(name=f"a.ipynb, cell {at}", number=at, ids=frozenset(ids if at == len(sources) else ()), source=one)
        for at, one in enumerate(sources, start=1)
    ]


def sliced(*sources, names=("ring_all_reduce",), **options):
    return slice_answer(cells_of(*sources, **options), "06.1", names)


def texts(*sources, **options):
    return [text.strip("\n") for _, text in sliced(*sources, **options).cells]


# Who handed in what


@pytest.mark.parametrize(
    ("path", "student"),
    [
        (f"s01/{RING}.ipynb", "s01"),
        (f"s01/{RING}/{RING}.ipynb", "s01"),
        ("s01/a/b/c/d/homework.ipynb", "s01"),
        ("s01.ipynb", "s01"),
        (f"s01_{RING}.ipynb", "s01"),
        (f"{RING}_s01.ipynb", f"{RING}_s01"),
        (f"First Last_123456_assignsubmission_file_/{RING}.ipynb", "First Last_123456"),
        (f"First Last_123456_assignsubmission_file_{RING}.ipynb", "First Last_123456"),
        (f"lastfirst_4711_98765_{RING}-1.ipynb", "lastfirst_4711"),
        (f"lastfirst_LATE_4711_98765_{RING}.ipynb", "lastfirst_4711"),
    ],
)
def test_a_student_is_found_however_the_platform_lays_it_out(tmp_path, path, student):
    put(tmp_path, path)
    found = read(tmp_path)
    assert list(found) == [student]
    assert [name for name, _ in found[student].handed["06.1"].answer.cells][-1].endswith("cell 3")


def test_checkpoints_hidden_files_and_other_files_are_no_students(tmp_path):
    put(tmp_path, f"s01/{RING}.ipynb")
    put(tmp_path, f"s01/.ipynb_checkpoints/{RING}-checkpoint.ipynb", "x = 1", modified_s=9e9)
    put(tmp_path, f".ipynb_checkpoints/{RING}-checkpoint.ipynb")
    put(tmp_path, f"__MACOSX/s01/._{RING}.ipynb")
    (tmp_path / "grades.csv").write_text("a")
    for name in ("README", ".DS_Store", "Thumbs.db"):
        (tmp_path / name).write_text("a")
    found = submissions.read(tmp_path)
    assert [one.student for one in found.students] == ["s01"]
    assert found.notes == ()
    assert handed(tmp_path).notes == ()


def test_the_newest_of_two_counts_and_a_note_says_so(tmp_path):
    put(tmp_path, f"s01/{RING}.ipynb", ANSWER + "  # old", modified_s=1000)
    put(tmp_path, f"s01/{RING} (1).ipynb", ANSWER + "  # new", modified_s=2000)
    found = handed(tmp_path)
    assert found.answer.cells == ((f"{RING} (1).ipynb, cell 1", f"{ANSWER}  # new\n"),)
    assert found.notes == (
        f"{RING} (1).ipynb counts, as the newer of 2 notebooks of chapter 06 ({RING}.ipynb does not).",
    )
    put(tmp_path, f"s01/old/{RING}.ipynb", modified_s=2000)
    assert handed(tmp_path).notes == (
        f"old/{RING}.ipynb counts, as the last by name of 3 notebooks, the newest of them equally old, of chapter 06 "
        f"(s01/{RING}.ipynb and s01/{RING} (1).ipynb do not).",
    )


def test_a_newer_one_that_cannot_be_read_does_not_count(tmp_path):
    put(tmp_path, f"s01/{RING}.ipynb", modified_s=1000)
    (tmp_path / f"s01/{RING} (1).ipynb").write_text("{")
    assert handed(tmp_path).unreadable == ""
    assert "cannot be read: it is not JSON" in read(tmp_path)["s01"].remarks[0]


def test_the_chapter_of_that_name_is_no_answer(tmp_path):
    put(tmp_path, f"s01/exercises/{RING}.ipynb", modified_s=1000)
    put(tmp_path, f"s01/notebooks/{RING}.ipynb", "x = 1", modified_s=2000)
    assert handed(tmp_path).answer.cells


def test_names_that_look_alike_are_two_students_with_a_remark(tmp_path):
    put(tmp_path, "Anna.ipynb")
    put(tmp_path, "anna.ipynb")
    put(tmp_path, "bob.ipynb")
    found = read(tmp_path)
    assert list(found) == ["Anna", "anna", "bob"]
    assert found["anna"].remarks[0].startswith("another submission is called Anna: the two names look alike")
    assert found["bob"].remarks == ()


@pytest.mark.parametrize("name", ["a\nb", "<b>x</b>", "=cmd()", "-rf", "a\u202eb", "\u0430nna", "a\udcffb", "%s"])
def test_any_name_becomes_one_that_can_be_printed(tmp_path, name):
    put(tmp_path, f"{name}/{RING}.ipynb")
    ((found, one),) = read(tmp_path).items()
    assert found.isprintable()
    found.encode("utf-8")
    assert one.handed["06.1"].answer.cells


def test_names_that_print_alike_stay_apart(tmp_path):
    put(tmp_path, "a\nb.ipynb")
    put(tmp_path, "a\\nb.ipynb")
    assert sorted(read(tmp_path)) == ["a\\nb", "a\\nb (2)"]


def test_questions_are_those_of_the_chapters_that_occur(tmp_path):
    put(tmp_path, f"s01/{RING}.ipynb")
    put(tmp_path, "s02.ipynb", "x = 1")
    found = submissions.read(tmp_path)
    assert found.questions == ("06.1", "06.2")
    assert found.students[1].handed["06.1"].answer.cells == ()
    assert submissions.read(tmp_path, ["06.2"]).questions == ("06.2",)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nowhere", "is no folder"),
        (lambda folder: folder, "holds no submission"),
        (lambda folder: put(folder, "s01.ipynb", "x = 1").parent, "no notebook in .* is one of the exercises"),
    ],
)
def test_a_folder_without_submissions_is_refused(tmp_path, make, said):
    with pytest.raises(PlanError, match=said):
        submissions.read(make(tmp_path))


def test_an_unknown_question_is_refused(tmp_path):
    put(tmp_path, "s01.ipynb")
    with pytest.raises(PlanError, match=r"there is no question '13\.1'"):
        submissions.read(tmp_path, ["13.1"])


# Files that nobody would hand in


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "it is not JSON"),
        (b"", "it is not JSON"),
        (b"\xff\xfe{}", "it is not UTF-8 text"),
        (b"[1, 2]", "it is JSON and no notebook"),
        (b"null", "it is JSON and no notebook"),
        (b'{"cells": 7}', "it is JSON and no notebook"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"cells": [' + b"{}," * 3000 + b"{}]}", "it has 3001 cells: at most 2000 are read"),
        (b'{"a": ' + b"9" * 5000 + b"}", "it is not JSON"),
    ],
)
def test_a_file_that_is_no_notebook_is_a_reason(tmp_path, content, said):
    (tmp_path / f"s01_{RING}.ipynb").write_bytes(content)
    put(tmp_path, "s02.ipynb")
    found = read(tmp_path)
    assert said in found["s01"].handed["06.1"].unreadable
    assert said in found["s01"].remarks[0]
    assert found["s02"].handed["06.1"].answer.cells


def test_a_file_without_a_chapters_name_counts_for_every_question(tmp_path):
    (tmp_path / "s01.ipynb").write_bytes(b"{")
    assert "s01.ipynb cannot be read: it is not JSON" in handed(tmp_path).unreadable


def test_a_gigantic_file_is_a_reason(tmp_path):
    path = tmp_path / "x.ipynb"
    with path.open("wb") as file:
        file.truncate(21 << 20)
    with pytest.raises(reading.Unreadable, match="larger than 20 MiB"):
        reading.read_cells(path)


def test_links_pipes_and_files_that_cannot_be_opened_are_reasons(tmp_path):
    outside = put(tmp_path, "outside.ipynb")
    folder = tmp_path / "class"
    put(folder, "s01/x.ipynb")
    (folder / "s02").mkdir()
    (folder / "s02" / "x.ipynb").symlink_to(outside)
    (folder / "s03.ipynb").symlink_to(outside)
    (folder / "s04").symlink_to(tmp_path)
    os.mkfifo(folder / "s05.ipynb")
    (folder / "s06").mkdir()
    (folder / "s06" / "x.ipynb").mkdir()
    (folder / "s07.ipynb").symlink_to("/dev/zero")
    found = read(folder)
    assert "links are not followed" in found["s02"].handed["06.1"].unreadable
    for student in ("s03", "s04", "s07"):
        assert "links are not followed" in found[student].remarks[0]
        assert found[student].handed["06.1"].answer.cells == ()
    assert "no regular file" in found["s05"].handed["06.1"].unreadable
    assert found["s06"].handed["06.1"].answer.cells == ()
    assert found["s01"].handed["06.1"].answer.cells


def test_notebooks_of_format_3_and_cells_without_a_text_are_read(tmp_path):
    old = {"nbformat": 3, "worksheets": [{"cells": [{"cell_type": "code", "input": [ANSWER]}]}]}
    (tmp_path / "s01.ipynb").write_text(json.dumps(old))
    assert len(handed(tmp_path).answer.cells) == 1
    odd = notebook(7, None, {"a": 1}, [1], ["import torch\n", "y = 1"], ANSWER, "x = '\ud800'", "y" * 200_000)
    odd["cells"] += [7, None, [], {"cell_type": "code"}, {"cell_type": ["code"], "source": "x"}]
    odd["cells"][5]["metadata"] = 7
    odd["cells"][5]["id"] = ["q06-1"]
    (tmp_path / "s01.ipynb").write_text(json.dumps(odd))
    assert handed(tmp_path).answer.cells == (("s01.ipynb, cell 6", ANSWER + "\n"),)


# What of a notebook defines an answer


def test_only_what_the_answer_needs_is_taken():
    got = sliced(
        f"{IMPORTS}\nimport math",
        "ranks = start(4)\nNUM = 3\nwhile True:\n    pass",
        "def helper(x):\n    return scale(x) * NUM",
        "from fractions import Fraction as scale\nprint('never')",
        "def ring_all_reduce(x, group):\n    n = dist.get_world_size(group)\n    return helper(x)\n\nprint(1)",
        "result = lk.grade.check('06.1', ring_all_reduce, ranks=ranks)",
    )
    assert [name for name, _ in got.cells] == [f"a.ipynb, cell {at}" for at in (1, 2, 3, 4, 5)]
    assert [text for _, text in got.cells] == [
        "\nimport torch.distributed as dist\n",
        "\nNUM = 3\n",
        "def helper(x):\n    return scale(x) * NUM\n",
        "from fractions import Fraction as scale\n",
        "def ring_all_reduce(x, group):\n    n = dist.get_world_size(group)\n    return helper(x)\n",
    ]
    assert got.notes == ()


def test_what_fills_a_name_is_taken_only_where_it_needs_nothing_more():
    answer = "def ring_all_reduce(x, group):\n    LOG.append(1)\n    return torch.clone(x)"
    source = "import torch\nLOG = []\ntorch.manual_seed(3)\nLOG.append(ranks.run(f))\nranks = start()"
    assert texts(source, answer) == ["import torch\nLOG = []", answer]


def test_local_names_need_nothing():
    assert texts(
        "x = ranks.run(f)\nranks = start()", "def ring_all_reduce(x, group):\n    ranks = 1\n    return x + ranks"
    ) == ["def ring_all_reduce(x, group):\n    ranks = 1\n    return x + ranks"]


@pytest.mark.parametrize(
    ("helper", "answer"),
    [
        ("CACHE = {}\nCACHE['a'] = 1", "def ring_all_reduce(x, group):\n    return CACHE['a']"),
        ("def base(f):\n    return f", "@base\ndef ring_all_reduce(x, group):\n    return x"),
        ("class Base:\n    pass", "class ring_all_reduce(Base):\n    pass"),
        ("SIZE: int = 3", "def ring_all_reduce(x, group=SIZE):\n    return x"),
        ("if True:\n    y = 1\nelse:\n    y = 2", "ring_all_reduce = lambda x, group: y"),
        ("SIZES = []\nSIZES.append(2)", "def ring_all_reduce(x, group):\n    return x[: SIZES[0]]"),
        ("from __future__ import annotations", "def ring_all_reduce(x: Some, group: Thing) -> None:\n    return x"),
        ("from math import *", "def ring_all_reduce(x, group):\n    return sqrt(x)"),
        ("def f():\n    global y\n    y = 1", "def ring_all_reduce(x, group):\n    return [y for _ in x]"),
    ],
)
def test_what_it_needs_is_found(helper, answer):
    assert texts(helper, "z = 5", answer) == [helper, answer]


def test_a_duplicated_cell_counts_once_and_the_last_that_is_no_stub_counts():
    for sources, last in (([ANSWER, ANSWER], 2), ([ANSWER, STUB], 1), ([STUB, ANSWER], 2), ([STUB, STUB], 2)):
        got = sliced(*sources)
        assert [name for name, _ in got.cells] == [f"a.ipynb, cell {last}"]
        assert got.notes == (f"ring_all_reduce is defined in cells 1 and 2: cell {last} counts.",)


def test_an_answer_that_wraps_itself_keeps_the_one_before():
    wrapped = "ring_all_reduce = timed(ring_all_reduce)"
    assert texts("def timed(f):\n    return f", ANSWER, wrapped) == ["def timed(f):\n    return f", ANSWER, wrapped]


def test_a_cell_that_is_no_python_is_kept_whole():
    broken = "def ring_all_reduce(x, group):\n    return x +\nprint(1)"
    assert texts(IMPORTS, broken) == [broken]
    assert texts(IMPORTS, "def ring(x:\n  y", ids=["q06-1"]) == ["def ring(x:\n  y"]


def test_a_deleted_answer_is_no_cell():
    assert sliced(IMPORTS, "x = 1").cells == ()
    assert sliced(IMPORTS, "ring_all_reduce(1, 2)", ids=["q06-1-try"]).cells == ()


def test_a_stub_outside_a_function_is_kept():
    stub = 'raise NotImplementedError("Exercise 06.1")'
    assert texts(stub, ids=["q06-1"]) == [stub]


def test_answers_of_several_functions_come_in_document_order():
    assert texts("def b():\n    pass", "def a():\n    pass", names=("a", "b")) == [
        "def b():\n    pass",
        "def a():\n    pass",
    ]


def test_commands_of_ipython_are_left_out_and_lines_stay():
    source = f"%load_ext autoreload\n{ANSWER}\n!ls\nring_all_reduce?"
    got = sliced("%%px\nimport torch", f"%%time\n{IMPORTS}", source.replace("x.clone", "torch.clone"))
    assert got.cells[0] == ("a.ipynb, cell 2", "\nimport torch\n")
    assert got.cells[1] == ("a.ipynb, cell 3", "\n" + ANSWER.replace("x.clone", "torch.clone") + "\n")
    assert got.notes == ("cell 2: its IPython commands were left out.", "cell 3: its IPython commands were left out.")


@pytest.mark.parametrize(
    "source",
    [
        "-" * 50_000 + "1",
        "(" * 50_000,
        "x" + ".a" * 30_000,
        "a+" * 40_000 + "a",
        "x\0",
        "%a\n" * 5_000 + ")",
        "x='\\ud800'",
    ],
)
def test_text_made_to_hurt_a_parser_hurts_nobody(source):
    assert texts(source, ANSWER) == [ANSWER]


def test_two_statements_on_one_line_go_together():
    cell = "y = 1; z = [\n1]\n" + ANSWER.replace("x.clone()", "y")
    assert texts(cell) == [cell]


def test_every_solution_is_found_whole(repository):
    for question in checks.QUESTIONS:
        exercise = checks.exercise(question)
        cells = reading.read_cells(repository / "solutions" / f"{exercise.chapter}.ipynb")
        got = slice_answer(cells, question, exercise.answers)
        text = "\n".join(source for _, source in got.cells)
        assert all(f"{name}(" in text for name in exercise.answers)
        assert "ranks" not in text.replace("ranks of", "").split("def ")[0]
        assert got.notes == ()
