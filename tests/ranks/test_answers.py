"""Every exercise on real ranks: right gets full marks, a stub zero, wrong exactly what it declares.

A wrong answer is a file `tests/grade/wrong/<question>/<name>.py` that begins with the lines `# status: partial`,
`# score: 4` and `# message: ...` (the exact message), then an empty line, then the code of a cell.
"""

import pathlib
import re

import nbformat
import pytest

from labkit import checks
from labkit.cluster import Ranks
from labkit.exercise import Result, mark
from labkit.grade import strip
from labkit.trial import Answer, observe

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
WRONG = sorted((REPOSITORY / "tests" / "grade" / "wrong").glob("*/*.py"))
HEADER = re.compile(r"# status: (?P<status>\w+)\n# score: (?P<score>\d+)\n# message: (?P<message>[^\n]+)\n\n")
CASE_TIMEOUT_S = 10.0
SEED = 3

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def marked(ranks: Ranks, question: str, source: str) -> Result:
    exercise = checks.exercise(question)
    cases = exercise.cases(SEED)
    answer = Answer(names=exercise.answers, cells=(("answer", source),))
    return mark(exercise, cases, list(observe(ranks, answer, cases, timeout_s=CASE_TIMEOUT_S)))


def cells(question: str, *, stripped: bool) -> str:
    """The import and answer cells of the solution's notebook."""
    exercise = checks.exercise(question)
    text = (REPOSITORY / "solutions" / f"{exercise.chapter}.ipynb").read_text(encoding="utf-8")
    notebook = nbformat.reads(strip(text) if stripped else text, as_version=4)
    chosen = [cell.source for cell in notebook.cells if cell.id == "imports" or is_answer(cell, question)]
    assert len(chosen) >= 2
    return "\n".join(chosen)


def is_answer(cell: nbformat.NotebookNode, question: str) -> bool:
    """Whether a cell is where the answer of a question is written."""
    marks = cell.metadata.get("nbgrader", {})
    return marks.get("solution", False) and cell.id.startswith(f"q{question.replace('.', '-')}")


@pytest.mark.parametrize("question", checks.QUESTIONS)
def test_the_solution_gets_full_marks(ranks: Ranks, question: str) -> None:
    result = marked(ranks, question, cells(question, stripped=False))
    assert (result.status, result.score) == ("full", 10), result


@pytest.mark.parametrize("question", checks.QUESTIONS)
def test_the_stub_gets_a_clear_zero(ranks: Ranks, question: str) -> None:
    result = marked(ranks, question, cells(question, stripped=True))
    assert (result.status, result.score, result.max_score) == ("unsolved", 0, 10), result
    assert question in result.message


@pytest.mark.parametrize("question", checks.QUESTIONS)
def test_every_question_has_three_wrong_answers(question: str) -> None:
    assert sum(path.parent.name == question for path in WRONG) >= 3


@pytest.mark.parametrize("path", WRONG, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_wrong_answer_gets_what_it_declares(ranks: Ranks, path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    header = HEADER.match(text)
    assert header, f"{path} does not begin with status, score and message"
    result = marked(ranks, path.parent.name, text)
    assert (result.status, str(result.score), result.message) == header.group("status", "score", "message")
    assert result.idea is not None, "no idea helps the author of this answer"
