"""The pages of a report: one of the class, with plots and a table to sort, and one for each student.

The class's page is the teacher's: it also tells what went wrong in hidden cases. A student's page is for handing out:
it names nobody else, shows of hidden cases only criterion and outcome, and is one file without scripts.

No page loads anything from a network. What comes from submissions passes through `shown` and jinja's escaping; a policy
in each page (Content-Security-Policy) refuses scripts besides the report's own, and on a student's page all of them.
"""

import base64
import hashlib
import json
import re
import secrets
import statistics
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from labkit import show
from labkit.exercise import CaseResult, Gradebook, Measure, Result
from labkit.grade.texts import MAX_NAME_CHARS, one_line, shown
from labkit.grade.withholding import for_student, outcome_of
from labkit.show import palette
from labkit.show.grades import STATUS_STYLES, missed_criteria, was_tried
from labkit.show.units import duration_text

__all__ = ["PLOTLY_FILE", "class_page", "student_page"]

PLOTLY_FILE = "plotly.min.js"
MAX_SHORT_CHARS = 300
_TEMPLATES = Path(__file__).parent / "templates"
# What a picture's light colours become on a dark page; report.css has the same ones.
_DARK = {palette.INK: "#e6edf3", palette.MUTED: "#9aa4af", palette.GRID: "#30363d", "#ffffff": "#161b22"}


def class_page(gradebook: Gradebook, files: Mapping[str, str]) -> str:
    """Return the page of the class.

    Args:
        gradebook: the results.
        files: for each student the name of the file of their page, without ending.
    """
    figures = [
        show.grade_statuses(gradebook),
        show.grade_totals(gradebook),
        show.grade_criteria(gradebook),
        show.grade_times(gradebook),
    ]
    nonce = secrets.token_urlsafe(16)
    return _environment().get_template("class.html").render(
        policy=f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        nonce=nonce,
        css=_css(),
        script=(_TEMPLATES / "report.js").read_text(encoding="utf-8"),
        plotly=PLOTLY_FILE,
        figures=[json.loads(one.to_json()) for one in figures],
        labels=[re.sub(r"<[^>]*>", " ", one.layout.title.text).strip() for one in figures],
        dark=_DARK,
        book=gradebook,
        files=files,
        tiles=_tiles(gradebook),
        questions=_questions(gradebook),
        mistakes=_mistakes(gradebook),
        any_tried=any(was_tried(one) for one in gradebook.results.values()),
        remarks=list(gradebook.said()),
    )  # fmt: skip


def student_page(gradebook: Gradebook, student: str) -> str:
    """Return the page of one student."""
    css = _css()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    results = [for_student(one) for one in gradebook.of(student)]
    return _environment().get_template("student.html").render(
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        css=css,
        book=gradebook,
        student=student,
        remarks=gradebook.remarks.get(student, ()),
        results=[(one, *_cases(one)) for one in results],
    )  # fmt: skip


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "one_line": one_line, "duration": duration_text, "anchor": _anchor}
    environment.filters |= {"outcome": outcome_of, "measure": _measure, "short": _short}
    environment.filters["sentence"] = _sentence
    environment.filters["name"] = _name
    environment.globals["styles"] = STATUS_STYLES
    return environment


@cache
def _css() -> str:
    """The style sheet with a colour for each status."""
    colors = "".join(f".is-{status} {{ --status: {style.color}; }}\n" for status, style in STATUS_STYLES.items())
    return (_TEMPLATES / "report.css").read_text(encoding="utf-8") + colors


def _anchor(question: str) -> str:
    return "q-" + re.sub(r"[^A-Za-z0-9]+", "-", question)


def _name(student: str, most: int = MAX_NAME_CHARS) -> str:
    return one_line(student, most) or "(no name)"


def _sentence(text: str) -> str:
    text = shown(text)
    return text[:1].upper() + text[1:] + "." * (not text.endswith("."))


def _short(text: str) -> str:
    return shown(text, MAX_SHORT_CHARS)


def _measure(one: Measure) -> tuple[str, str, bool]:
    """A measured number, its budget, and whether it is kept; a number that is none is kept by nobody."""
    if not isinstance(one.value, int | float):
        return shown(one.value, MAX_SHORT_CHARS), _number(one.budget, one.unit), False
    return _number(one.value, one.unit), _number(one.budget, one.unit), one.kept


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "no limit"
    try:
        text = f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
    except (OverflowError, ValueError):  # infinite, no number, or too long to be one
        text = "beyond any number"
    return f"{text} {unit}".rstrip()


def _tiles(gradebook: Gradebook) -> list[tuple[str, str]]:
    """The numbers at the top of the class's page, each with what it counts."""
    totals = [gradebook.score(one) for one in gradebook.students]
    results = list(gradebook.results.values())
    # What could not be read has taken no time.
    ended = [one for one in results if one.status in ("error", "timeout", "crashed") and one.seconds > 0]
    counts = ((len(gradebook.students), "student"), (len(gradebook.questions), "question"))
    tiles = [(str(count), word + "s" * (count != 1)) for count, word in counts]
    if totals and gradebook.max_score:
        tiles.append((f"{statistics.fmean(totals):.1f}", f"mean of {gradebook.max_score} points"))
        tiles.append((f"{statistics.median(totals):g}", f"median of {gradebook.max_score} points"))
    tiles.append((f"{sum(one.passed for one in results)} / {len(results)}", "answers with full marks"))
    tiles.append((str(len(ended)), "answers that raised, hung or crashed"))
    return tiles


def _questions(gradebook: Gradebook) -> list[dict[str, Any]]:
    """One row for each question: what the plots show, as numbers."""
    missed: dict[str, tuple[str, int, int]] = {}
    for question, text, count, tried in missed_criteria(gradebook):
        if count:
            missed.setdefault(question, (text, count, tried))
    rows = []
    for question in gradebook.questions:
        results = [gradebook.results[student, question] for student in gradebook.students]
        times = [one.seconds for one in results if was_tried(one) and one.seconds > 0]
        rows.append(
            {
                "question": question,
                "title": results[0].title if results else "",
                "max_score": results[0].max_score if results else 0,
                "mean": f"{statistics.fmean(one.score for one in results):.1f}" if results else "–",
                "counts": [(name, sum(one.status == name for one in results)) for name in STATUS_STYLES],
                "missed": missed.get(question),
                "time": duration_text(statistics.median(times)) if times else "not tried",
            }
        )
    return rows


def _mistakes(gradebook: Gradebook) -> list[dict[str, Any]]:
    """What went wrong, equal messages together: by question, the most frequent first."""
    found: dict[tuple[str, str, str], list[str]] = {}
    hidden: set[tuple[str, str, str]] = set()
    for (student, question), result in gradebook.results.items():
        if result.passed or not was_tried(result):
            continue
        key = (question, result.status, _short(result.message))
        found.setdefault(key, []).append(student)
        if result.first_failure is not None and result.first_failure.hidden:
            hidden.add(key)
    order = {question: place for place, question in enumerate(gradebook.questions)}
    place = {student: place for place, student in enumerate(gradebook.students)}
    rows = [
        {
            "question": key[0],
            "status": key[1],
            "message": key[2],
            "students": sorted(students, key=place.__getitem__),
            "hidden": key in hidden,
        }
        for key, students in found.items()
    ]
    return sorted(rows, key=lambda row: (order[row["question"]], -len(row["students"]), row["message"]))


def _cases(result: Result) -> tuple[list[CaseResult], list[tuple[str, int, int, str]]]:
    """The visible cases and the rows of hidden ones; none of an answer that is not there, where each says the same."""
    if all(one.outcome in ("unsolved", "missing") for one in result.cases):
        return [], []
    return [one for one in result.cases if not one.hidden], _hidden_rows(result)


def _hidden_rows(result: Result) -> list[tuple[str, int, int, str]]:
    """(criterion's text, passed, all, how the others ended) of the hidden cases, in the order of criteria."""
    texts = {name: text for name, text, _, _ in result.earned}
    groups: dict[str, list[CaseResult]] = {}
    for one in result.cases:
        if one.hidden:
            groups.setdefault(one.criterion, []).append(one)
    rows = []
    for name, cases in groups.items():
        ends = [outcome_of(one) for one in cases if not one.passed]
        counted = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends))
        rows.append((texts.get(name, name), len(cases) - len(ends), len(cases), counted))
    return rows
