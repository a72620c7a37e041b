"""nbgrader makes its release version of every solution: for teachers who have it, under EXTRAS=nbgrader."""

import json
import os
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest

from labkit import checks

pytestmark = pytest.mark.nbgrader

TIMEOUT_S = 240
# What the gradebook says that nbgrader has made of the assignment.
POINTS = """
import json, sys, warnings
warnings.simplefilter("ignore")
from nbgrader.api import Gradebook
with Gradebook("sqlite:///gradebook.db") as book:
    found = {}
    for notebook in book.find_assignment("labkit").notebooks:
        found[notebook.name] = {cell.name: cell.max_score for cell in notebook.grade_cells}
print(json.dumps(found))
"""


def run(folder, *arguments):
    # nbgrader's own libraries warn; what counts here is what it makes.
    # It starts alembic by its name.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    own = {"PATH": path, "PYTHONWARNINGS": "ignore", "JUPYTER_CONFIG_DIR": str(folder / "config")}
    environment = {**os.environ, **own}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def regions(notebook, kind):
    """The lines of the notebook's regions of a kind."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    inside = re.findall(rf"### BEGIN {kind}\n(.*?)### END {kind}", text, re.DOTALL)
    return [line for part in inside for line in part.splitlines() if line.strip()]


@pytest.mark.slow
def test_every_solution_becomes_a_release_without_solutions_and_hidden_tests(tmp_path, repository):
    sources = sorted((repository / "solutions").glob("*.ipynb"))
    source = tmp_path / "source" / "labkit"
    source.mkdir(parents=True)
    for path in sources:
        (source / path.name).write_bytes(path.read_bytes())
    run(tmp_path, "-m", "nbgrader", "generate_assignment", "labkit", "--create")
    points = json.loads(run(tmp_path, "-c", POINTS))
    asked = {question: checks.exercise(question) for question in checks.QUESTIONS}
    for path in sources:
        wanted = {
            f"q{question.replace('.', '-')}-check": float(exercise.max_score)
            for question, exercise in asked.items()
            if exercise.chapter == path.stem
        }
        assert points[path.stem] == wanted
        _check_release(path, tmp_path / "release" / "labkit" / path.name)


def _check_release(source: pathlib.Path, release: pathlib.Path) -> None:
    solution, released = (nbformat.read(path, as_version=4) for path in (source, release))
    assert [cell.id for cell in released.cells] == [cell.id for cell in solution.cells]
    text = "\n".join(cell.source for cell in released.cells)
    assert not re.search(r"(BEGIN|END) (SOLUTION|HIDDEN TESTS)", text)
    kept = {line.strip() for cell in released.cells for line in cell.source.splitlines()}
    elsewhere = {
        line.strip()
        for cell in solution.cells
        for line in re.sub(r"### BEGIN (\w+ ?\w+)\n.*?### END \1", "", cell.source, flags=re.DOTALL).splitlines()
    }
    hidden = regions(solution, "SOLUTION") + regions(solution, "HIDDEN TESTS")
    assert hidden
    assert [line for line in hidden if line.strip() in kept - elsewhere] == []
    for cell in released.cells:
        marks = cell.metadata.get("nbgrader", {})
        if marks.get("solution"):
            assert "raise NotImplementedError()" in cell.source
        if marks.get("grade"):
            assert marks["locked"]
            assert not cell.metadata["editable"]
