"""From a folder of submissions to students and their answers; one that cannot be read is a remark, never the end."""

import os
import pathlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from labkit import checks
from labkit.errors import PlanError, listed
from labkit.exercise import Exercise, Observation
from labkit.grade.entries import Entries, few, look
from labkit.grade.reading import CodeCell, Unreadable, read_cells, shown
from labkit.grade.slicing import defines, functions, slice_answer
from labkit.trial import Answer

__all__ = ["Handed", "Submission", "Submissions", "read"]

MAX_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a student handed in for one question.

    Attributes:
        answer: the cells that define it; none when it is not there.
        notes: how they were chosen.
        unreadable: why there may be an answer that cannot be read; "" when all was read.
        absent: what is missing of it; "" when all functions are there.
    """

    answer: Answer
    notes: tuple[str, ...] = ()
    unreadable: str = ""
    absent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One student's answers by question, and remarks on the whole."""

    student: str
    handed: Mapping[str, Handed]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submissions:
    """A class.

    Attributes:
        students: in the order of their names.
        questions: those that all are graded on.
        notes: what is to be said of the folder, such as files that are no student's.
    """

    students: tuple[Submission, ...]
    questions: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Notebook:
    path: pathlib.Path
    named: frozenset[str]
    held: frozenset[str] = frozenset()
    modified_s: float = 0.0
    cells: tuple[CodeCell, ...] = ()
    why: str = ""

    @property
    def chapters(self) -> frozenset[str]:
        return self.named | self.held


def read(folder: str | os.PathLike[str], questions: Sequence[str] | None = None) -> Submissions:
    """Find students and their answers.

    A student is a folder, with notebooks at any depth, or files such as `s01.ipynb`, `s01_06_ring_and_tree.ipynb` or
    what Moodle and Canvas name them. Links are not followed; checkpoints are left out. An archive is a student with a
    remark. The chapter of a notebook is told by its cells and its name. Of two notebooks of a chapter the newest that
    can be read counts.

    Args:
        folder: where the submissions are.
        questions: which to grade; None takes all of the chapters that occur in any submission.

    Raises:
        PlanError: there is no such folder or question, or no submission in it.
    """
    root = pathlib.Path(folder)
    if not root.is_dir():
        raise PlanError(f"{root} is no folder: it holds a folder, or a notebook, for each student.")
    known = {question: checks.exercise(question) for question in (checks.QUESTIONS if questions is None else questions)}
    found = look(root, _chapters())
    students = found.students
    if not any(one.paths for one in students.values()):
        raise PlanError(
            f"{root} holds no submission: a student is a folder with notebooks, or a file NAME.ipynb. {_there(found)}"
        )
    read_in = {name: [_notebook(path, known.values()) for path in one.paths] for name, one in students.items()}
    if questions is None:
        occurring = {chapter for notebooks in read_in.values() for one in notebooks for chapter in one.chapters}
        known = {question: one for question, one in known.items() if one.chapter in occurring}
        if not known:
            raise PlanError(f"no notebook in {root} is one of the exercises: name the questions to grade all on them.")
    names = _unique(students)
    submissions = (
        Submission(
            student=names[name],
            handed={question: _handed(one, read_in[name], students[name].remarks) for question, one in known.items()},
            remarks=(*students[name].remarks, *_remarks(read_in[name]), *_alike(name, students)),
        )
        for name in students
    )
    return Submissions(
        students=tuple(sorted(submissions, key=lambda one: one.student)),
        questions=tuple(known),
        notes=(f"at the top of the folder, not looked at: {few(found.strays)}.",) if found.strays else (),
    )


def _there(found: Entries) -> str:
    """What a folder without any notebook holds."""
    said = [f"{shown(name)}: {remark}" for name, one in sorted(found.students.items()) for remark in one.remarks]
    if found.strays:
        said.append(f"{few(found.strays)} {'is none' if len(found.strays) == 1 else 'are none'}.")
    more = f" ({len(said) - MAX_TOLD} more like this)" if len(said) > MAX_TOLD else ""
    return " ".join(said[:MAX_TOLD]) + more if said else "There is nothing to grade in it."


def _chapters() -> set[str]:
    return {checks.exercise(question).chapter for question in checks.QUESTIONS}


def _notebook(path: pathlib.Path, exercises: Iterable[Exercise]) -> _Notebook:
    exercises = tuple(exercises)
    named = frozenset(one.chapter for one in exercises if one.chapter in path.name)
    try:
        modified_s = path.lstat().st_mtime
        cells = read_cells(path)
    except (Unreadable, OSError) as error:
        return _Notebook(path=path, named=named, why=str(error))
    held = frozenset(one.chapter for one in exercises if defines(cells, one.question, one.answers))
    return _Notebook(path=path, named=named, held=held, modified_s=modified_s, cells=cells)


def _handed(exercise: Exercise, notebooks: Sequence[_Notebook], remarks: Sequence[str]) -> Handed:
    nothing = Answer(names=exercise.answers)
    chapter = exercise.chapter
    ours = sorted(
        (one for one in notebooks if chapter in one.chapters), key=lambda one: (one.modified_s, one.path.name)
    )
    good = [one for one in ours if not one.why]
    # The chapter itself has the exercise's name: handed in along with it, it is no second answer.
    good = [one for one in good if chapter in one.held] or good
    if good:
        newest = good[-1]
        part = slice_answer(newest.cells, exercise.question, exercise.answers)
        return Handed(
            answer=Answer(names=exercise.answers, cells=part.cells),
            notes=(*_which(exercise, good), *part.notes),
            absent=_absent(exercise, newest, part.cells),
        )
    unread = ours or [one for one in notebooks if one.why and not one.chapters]
    if unread:
        return Handed(answer=nothing, unreadable=f"{shown(unread[-1].path.name)} cannot be read: {unread[-1].why}")
    if not notebooks:
        return Handed(answer=nothing, absent=" ".join(remarks))
    there = few([one.path.name for one in notebooks])
    return Handed(
        answer=nothing,
        absent=f"no notebook of chapter {_number(chapter)} was handed in ({chapter}.ipynb): there is {there}.",
    )


def _which(exercise: Exercise, good: Sequence[_Notebook]) -> Iterator[str]:
    """Which of several notebooks of a chapter counts: the last of them."""
    *others, newest = good
    if not others:
        return
    names = [one.path.name for one in good]
    if len(set(names)) < len(names):
        names = [f"{one.path.parent.name}/{one.path.name}" for one in good]
    *left, counts = [shown(name) for name in names]
    why = f"as the {'newer' if len(good) == 2 else 'newest'} of {len(good)} notebooks"
    if others[-1].modified_s == newest.modified_s:
        why = f"as the last by name of {len(good)} notebooks, the newest of them equally old,"
    does = "does" if len(left) == 1 else "do"
    yield f"{counts} counts, {why} of chapter {_number(exercise.chapter)} ({listed(left)} {does} not)."


def _absent(exercise: Exercise, notebook: _Notebook, cells: Sequence[tuple[str, str]]) -> str:
    """Which functions a notebook lacks, and which it has."""
    absent = [name for name in exercise.answers if not any(name in source for _, source in cells)]
    if not absent:
        return ""
    found = functions(notebook.cells)
    has = f"it defines {few(found)}" if found else "it defines no function"
    return Observation.missing(absent, f" in {shown(notebook.path.name)}: {has}").message


def _number(chapter: str) -> str:
    return chapter.partition("_")[0]


def _remarks(notebooks: Iterable[_Notebook]) -> Iterator[str]:
    for one in notebooks:
        if one.why:
            yield f"{shown(one.path.name)} cannot be read: {one.why}"


def _unique(names: Iterable[str]) -> dict[str, str]:
    """A name of each student that can be printed and is nobody else's."""
    taken: dict[str, str] = {}
    for name in names:
        clean, number = shown(name), 1
        while clean in taken.values():
            number += 1
            clean = f"{shown(name)} ({number})"
        taken[name] = clean
    return taken


def _alike(name: str, students: Iterable[str]) -> Iterator[str]:
    def look(one: str) -> str:
        return unicodedata.normalize("NFKC", one).casefold()

    for other in students:
        if other != name and look(other) == look(name):
            yield f"another submission is called {shown(other)}: the two names look alike, and each counts for itself."
