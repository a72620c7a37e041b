"""From solutions to exercises: what goes, what stays, and what is refused with cell and line."""

import copy
import json
import stat

import nbformat
import pytest

import labkit as lk
from labkit.errors import PlanError
from labkit.grade import building

ANSWER = '''def ring_all_reduce(x, group):
    """Add up."""
    ### BEGIN SOLUTION
    y = x + 1
    return y
    ### END SOLUTION
'''
STUB = '''def ring_all_reduce(x, group):
    """Add up."""
    raise NotImplementedError("Exercise 06.1 is not solved yet: write ring_all_reduce, then run its cell again.")
'''
CHECK = """result = lk.grade.check("06.1", ring_all_reduce, ranks=ranks)
### BEGIN HIDDEN TESTS
assert result.passed, result.message
### END HIDDEN TESTS
result"""


def cell(source, name="q06-1", kind="code"):
    extra = {"outputs": [{"output_type": "stream", "name": "stdout", "text": "y"}], "execution_count": 3}
    return {"cell_type": kind, "id": name, "metadata": {}, "source": source, **(extra if kind == "code" else {})}


def notebook(*cells):
    return {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def stripped(source, **cell_options):
    return lk.grade.strip(notebook(cell(source, **cell_options)))["cells"][0]["source"]


def test_a_solution_becomes_a_stub_that_says_what_to_write():
    assert stripped(ANSWER) == STUB


def test_the_stub_raises_its_message():
    namespace = {}
    exec(stripped(ANSWER), namespace)
    with pytest.raises(NotImplementedError, match=r"^Exercise 06\.1 is not solved yet: write ring_all_reduce, then"):
        namespace["ring_all_reduce"](1, None)


def test_a_method_is_named_with_its_class():
    region = "        ### BEGIN SOLUTION\n        return x\n        ### END SOLUTION"
    text = f"class Linear:\n    bias = 1\n\n    def forward(self, x):\n{region}"
    assert 'write Linear.forward, then run its cell again.")' in stripped(text)


def test_a_region_outside_a_function_asks_for_the_answer():
    got = stripped("### BEGIN SOLUTION\nx = 1\n### END SOLUTION\nprint(x)", name="q12-2-size")
    line = 'raise NotImplementedError("Exercise 12.2 is not solved yet: write the answer, then run its cell again.")'
    assert got == f"{line}\nprint(x)"


def test_hidden_tests_outputs_and_counts_go():
    (got,) = lk.grade.strip(notebook(cell(CHECK, name="q06-1-check")))["cells"]
    assert got["source"] == 'result = lk.grade.check("06.1", ring_all_reduce, ranks=ranks)\nresult'
    assert (got["outputs"], got["execution_count"]) == ([], None)


def test_two_regions_in_one_cell():
    second = ANSWER.replace("ring_all_reduce", "other")
    assert stripped(ANSWER + "\n\n" + second) == STUB + "\n\n" + STUB.replace(
        "write ring_all_reduce", "write other"
    ).replace("def ring_all_reduce", "def other")


def test_sources_as_lists_stay_lists():
    lines = stripped(ANSWER.splitlines(keepends=True))
    assert lines == STUB.splitlines(keepends=True)
    assert stripped(["x = 1\n", "### BEGIN HIDDEN TESTS\n", "y\n", "### END HIDDEN TESTS"]) == ["x = 1"]


def test_the_same_kind_comes_back_and_the_input_stays(tmp_path):
    given = nbformat.from_dict(notebook(cell(ANSWER), cell("text", name="about", kind="markdown")))
    before = copy.deepcopy(given)
    got = lk.grade.strip(given)
    assert given == before
    assert isinstance(got, nbformat.NotebookNode)
    path = tmp_path / "06_ring.ipynb"
    path.write_text(json.dumps(given))
    texts = {lk.grade.strip(json.dumps(given)), lk.grade.strip(path), lk.grade.strip(str(path))}
    assert len(texts) == 1
    (text,) = texts
    assert json.loads(text) == got
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    assert lk.grade.strip(text) == text


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("def f():\n    ### BEGIN SOLUTION\n    pass", {}, "cell q06-1, line 2: BEGIN SOLUTION has no END SOLUTION."),
        ("x\n### END SOLUTION", {}, "cell q06-1, line 2: END SOLUTION without BEGIN SOLUTION."),
        (
            "### BEGIN SOLUTION\n### BEGIN HIDDEN TESTS",
            {},
            "cell q06-1, line 2: a region begins in the one of line 1: regions do not nest.",
        ),
        ("### BEGIN SOLUTION\n### END HIDDEN TESTS", {}, "cell q06-1, line 2: END HIDDEN TESTS without BEGIN"),
        (ANSWER, {"name": "helper"}, "cell helper, line 3: a solution stands in a cell without a question"),
        (ANSWER, {"name": "q06x"}, "cell q06x, line 3: a solution stands in a cell without a question"),
        ("# BEGIN SOLUTION\nx\n# END SOLUTION", {}, "cell q06-1, line 1: '# BEGIN SOLUTION' is no mark"),
        ("x = 1  ### BEGIN SOLUTION", {}, "cell q06-1, line 1: 'x = 1  ### BEGIN SOLUTION' is no mark"),
        ("### begin solution", {}, "cell q06-1, line 1: '### begin solution' is no mark"),
        ("### BEGIN SOLUTION\n%%px\n### END SOLUTION", {}, "cell q06-1, line 1: the cell is not Python"),
        ("### BEGIN SOLUTION", {"kind": "markdown"}, "cell q06-1, line 1: a mark stands in a markdown cell"),
        (7, {}, "the source of cell q06-1 is no text"),
        ([7], {}, "the source of cell q06-1 is no text"),
    ],
)
def test_marks_that_do_not_fit_are_refused_with_cell_and_line(source, options, said):
    with pytest.raises(PlanError) as refused:
        stripped(source, **options)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "this is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "no list of cells"),
        ('{"cells": 3}', "no list of cells"),
        ('{"cells": [3]}', "no list of cells"),
        ("nowhere.ipynb", "nowhere.ipynb cannot be read"),
        (7, "strip got a int"),
    ],
)
def test_what_is_no_notebook_is_refused(given, said):
    with pytest.raises(PlanError, match=said):
        lk.grade.strip(given)


@pytest.fixture
def folders(tmp_path):
    solutions = tmp_path / "solutions"
    solutions.mkdir()
    (solutions / "06_ring.ipynb").write_text(json.dumps(notebook(cell(ANSWER))))
    return solutions, tmp_path / "exercises"


def test_build_writes_what_differs_and_only_that(folders):
    solutions, exercises = folders
    assert [(one.name, one.how) for one in building.differences(*folders)] == [("06_ring.ipynb", "missing")]
    building.build(*folders)
    written = exercises / "06_ring.ipynb"
    assert written.read_text() == lk.grade.strip(solutions / "06_ring.ipynb")
    assert stat.S_IMODE(written.stat().st_mode) == 0o644
    before = written.stat().st_mtime_ns, written.stat().st_ino
    assert building.build(*folders) == ()
    assert (written.stat().st_mtime_ns, written.stat().st_ino) == before
    written.write_text("old")
    (exercises / "07_orphan.ipynb").write_text("{}")
    assert [(one.name, one.how) for one in building.build(*folders)] == [
        ("06_ring.ipynb", "different"),
        ("07_orphan.ipynb", "has no solution"),
    ]
    assert (exercises / "07_orphan.ipynb").exists()
    assert sorted(path.name for path in exercises.iterdir()) == ["06_ring.ipynb", "07_orphan.ipynb"]


def test_a_broken_solution_is_named_and_nothing_is_written(folders):
    solutions, exercises = folders
    (solutions / "07_broken.ipynb").write_text("{")
    with pytest.raises(PlanError, match=r"07_broken\.ipynb: this is not JSON"):
        building.build(*folders)
    assert not exercises.exists()


def test_exercises_are_what_the_solutions_make_of_them(repository):
    found = building.differences(repository / "solutions", repository / "exercises")
    assert [(one.name, one.how) for one in found] == [], "run `labkit exercises build`"
