"""Every notebook runs top to bottom in a real kernel; stored without outputs, with stable ids."""

import json
import pathlib
import re

import nbformat
import pytest

from tests.notebooks.notebooks import CHAPTERS, EXERCISES, SOLUTIONS, code_cells, kernel

FORBIDDEN = re.compile(r"input\(|get_ipython\(\)\.system|^\s*!|^\s*%pip", re.MULTILINE)
ALL = [*CHAPTERS, *EXERCISES, *SOLUTIONS]
QUESTION = re.compile(r"q(\d\d-\d)(-[a-z0-9]+)?$")


def name_of(path: pathlib.Path) -> str:
    return f"{path.parent.name}-{path.stem}"


every = pytest.mark.parametrize("path", ALL, ids=name_of)
of_exercises = pytest.mark.parametrize("path", [*EXERCISES, *SOLUTIONS], ids=name_of)
chapters = pytest.mark.parametrize("path", CHAPTERS, ids=name_of)
solutions = pytest.mark.parametrize("path", SOLUTIONS, ids=name_of)
exercises = pytest.mark.parametrize("path", EXERCISES, ids=name_of)


def metadata_of(name: str) -> set[str]:
    """What the metadata of a cell may hold: nbgrader's marks for answers and checks alone."""
    match = QUESTION.fullmatch(name)
    return {"nbgrader"} if match and match[2] not in ("-text", "-try") else {"tags"}


@every
def test_stored_without_outputs_and_with_names_for_ids(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
        assert set(cell.metadata) <= metadata_of(cell.id)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for name in ids:
        assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name), f"{name} is no name a person gave"
        assert not re.fullmatch(r"[0-9a-f]{8}", name), f"{name} was made by a program"


@every
def test_stored_as_jupyter_would_store_it(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


@every
def test_says_what_it_needs_in_one_cell_and_has_no_shell_commands(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    tagged = [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert code_cells(notebook)[0] is tagged[0]
    for cell in code_cells(notebook):
        assert not FORBIDDEN.search(cell.source), cell.source


@of_exercises
def test_every_question_has_its_text_its_answer_and_its_check(path: pathlib.Path) -> None:
    cells = {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}
    questions = {match[1] for name in cells if (match := QUESTION.fullmatch(name))}
    assert questions
    for question in questions:
        check = cells[f"q{question}-check"].metadata.nbgrader
        points = {"grade": True, "locked": True, "points": 10, "schema_version": 3, "solution": False, "task": False}
        assert check == {"grade_id": f"q{question}-check", **points}
        assert cells[f"q{question}-text"].cell_type == "markdown"
        assert cells[f"q{question}-try"].metadata == {}
        answers = [cell for name, cell in cells.items() if name.startswith(f"q{question}") and is_answer(cell)]
        assert answers
        for cell in answers:
            marks = {"grade": False, "locked": False, "schema_version": 3, "solution": True, "task": False}
            assert cell.metadata.nbgrader == {"grade_id": cell.id, **marks}


def is_answer(cell: nbformat.NotebookNode) -> bool:
    return cell.metadata.get("nbgrader", {}).get("solution", False)


@chapters
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_top_to_bottom_with_every_cell_run_twice(path: pathlib.Path) -> None:
    run(path, times=2)


@solutions
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_solution_runs_top_to_bottom(path: pathlib.Path) -> None:
    run(path, times=1)


def run(path: pathlib.Path, *, times: int) -> None:
    notebook = nbformat.read(path, as_version=4)
    with kernel(notebook, path) as client:
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                for _ in range(times):
                    client.execute_cell(cell, index)  # raises CellExecutionError with the cell's traceback
                assert not [output for output in cell.outputs if output.output_type == "error"]
                assert len(json.dumps(cell.outputs)) < 2_000_000, "an output that would flood the notebook"


@exercises
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_exercise_stops_at_its_first_stub_with_a_clear_message(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    first = next(name for cell in code_cells(notebook) if is_answer(cell) and (name := cell.id))
    question = QUESTION.fullmatch(first)[1].replace("-", ".")
    with kernel(notebook, path) as client:
        client.allow_errors = True
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            client.execute_cell(cell, index)
            errors = [output for output in cell.outputs if output.output_type == "error"]
            if errors:
                break
    assert cell.id == f"{first[:5]}-try", errors
    assert f"Exercise {question} is not solved yet: write " in errors[0].evalue
    assert "NotImplementedError" in f"{errors[0].ename}: {errors[0].evalue}"
