"""What a teacher gets of a graded class, as files in one folder.

- `index.html` is the class: plots, a table to sort, what went wrong. `students/<student>.html` is for each student.
- `scores.csv` is for a learning management system: UTF-8, RFC 4180. A row for each student: `student`, the points of
  each question, `total`, `max`, `percent`, then the status of each question as `<question> status`. A cell that a
  spreadsheet would take for a formula has an apostrophe before it (`labkit.grade.texts.cell` says how to read it back),
  and what cannot be seen in a name is written out, so that every row is one line.
- `gradescope/<student>/results.json` is what Gradescope reads (`labkit.grade.gradescope`).
- `results.json` is everything, in ASCII: `{"schema": "labkit.grades", "version": 1, "seed", "sandbox", "max_score",
  "remarks": [{"student", "question", "remark"}], "questions": [{"question", "title", "max_score"}],
  "students": [{"student", "file", "score", "remarks", "results"}]}`. The remarks at the top are all that the grader
  noticed; where "" stands for student or question, one concerns all of them.
  A result has the fields of `labkit.exercise.Result`, hidden cases with their inputs included. `file` is the name of
  the student's files: `student` itself where that can stand as one, else one made of it. Bytes of a name that are no
  UTF-8 stay as Python's `os.fsdecode` carries them, and a number that readers of JSON cannot take is a text ("nan",
  "inf", and "0x..." for one of hundreds of digits).

Grades are personal: files can be read by their owner alone, and so can the folders that are made. Each file appears
whole or not at all. Files of students who are no longer there stay.
"""

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from labkit.exercise import Gradebook
from labkit.grade.gradescope import gradescope
from labkit.grade.pages import PLOTLY_FILE, class_page, student_page
from labkit.grade.texts import cell, file_names, one_line

__all__ = ["write"]

SCHEMA = "labkit.grades"
VERSION = 1
MAX_BITS = 1_000
_OWNER_ONLY = 0o700


def write(gradebook: Gradebook, out: Path) -> Path:
    """Write the report.

    Args:
        gradebook: the results of the class.
        out: the folder to write to; made if it does not exist.

    Returns:
        The page of the class, to open in a browser.
    """
    files = file_names(gradebook.students)
    out.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
    for name, text in _files(gradebook, files):
        path = out / name
        for folder in reversed(path.relative_to(out).parents[:-1]):
            (out / folder).mkdir(mode=_OWNER_ONLY, exist_ok=True)
        _write(path, text)
    return out / "index.html"


def _files(gradebook: Gradebook, files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Every file with its text; the page that leads to all others comes last."""
    yield "results.json", _json(_everything(gradebook, files))
    yield "scores.csv", _scores(gradebook)
    for student, name in files.items():
        yield f"gradescope/{name}/results.json", _json(gradescope(gradebook, student))
        yield f"students/{name}.html", student_page(gradebook, student)
    yield PLOTLY_FILE, get_plotlyjs()
    yield "index.html", class_page(gradebook, files)


def _scores(gradebook: Gradebook) -> str:
    text = io.StringIO()
    rows = csv.writer(text)  # ends lines with CR LF, as RFC 4180 wants
    names = list(gradebook.questions)
    rows.writerow(map(cell, ["student", *names, "total", "max", "percent", *(f"{name} status" for name in names)]))
    most = gradebook.max_score
    for student in gradebook.students:
        results, total = list(gradebook.of(student)), gradebook.score(student)
        percent = f"{100 * total / most:.1f}" if most else ""
        scores = [one.score for one in results]
        rows.writerow([cell(one_line(student)), *scores, total, most, percent, *(cell(one.status) for one in results)])
    return text.getvalue()


def _everything(gradebook: Gradebook, files: dict[str, str]) -> dict[str, Any]:
    first = list(gradebook.of(gradebook.students[0])) if gradebook.students else []
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "seed": gradebook.seed,
        "sandbox": gradebook.sandbox,
        "max_score": gradebook.max_score,
        "remarks": [
            {"student": student, "question": question, "remark": remark}
            for student, question, remark in gradebook.said()
        ],
        "questions": [{"question": one.question, "title": one.title, "max_score": one.max_score} for one in first],
        "students": [
            {
                "student": student,
                "file": files[student],
                "score": gradebook.score(student),
                "remarks": list(gradebook.remarks.get(student, ())),
                "results": [one.to_plain() for one in gradebook.of(student)],
            }
            for student in gradebook.students
        ],
    }


def _json(plain: Any) -> str:
    return json.dumps(_writable(plain), indent=1, allow_nan=False) + "\n"


def _writable(plain: Any) -> Any:
    """Plain data with texts for the numbers that JSON, or who reads it, cannot take."""
    if isinstance(plain, dict):
        return {name: _writable(value) for name, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_writable(value) for value in plain]
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    return hex(plain) if isinstance(plain, int) and plain.bit_length() > MAX_BITS else plain


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    number, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
