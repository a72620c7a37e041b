"""DeepSpeed behind the sandbox: it loads, trains, saves and restores where there is no compiler and no home."""

import nbformat
import pytest

from labkit import checks
from labkit.grade.question import grade
from labkit.grade.sandbox import Sandbox
from labkit.trial import Answer

pytestmark = [pytest.mark.sandbox, pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


def test_the_repaired_run_gets_full_marks_behind_the_sandbox(chosen: Sandbox, repository) -> None:
    exercise = checks.exercise("10.1")
    notebook = nbformat.read(repository / "solutions" / f"{exercise.chapter}.ipynb", as_version=4)
    sources = [one.source for one in notebook.cells if one.metadata.get("nbgrader", {}).get("solution")]
    answer = Answer(names=exercise.answers, cells=tuple(("a cell", source) for source in sources))
    result = grade(exercise, answer, seed=5, sandbox=chosen)
    assert (result.status, result.score) == ("full", 10), result.message
