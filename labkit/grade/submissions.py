"""From a folder of submissions to students and their answers; one that cannot be read is a remark, never the end."""

import os
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from labkit import checks
from labkit.errors import PlanError
from labkit.exercise import Exercise
from labkit.grade.reading import CodeCell, Unreadable, read_cells, shown
from labkit.grade.slicing import defines, slice_answer
from labkit.trial import Answer

__all__ = ["Handed", "Submission", "Submissions", "read"]

MAX_DEPTH = 8
MAX_FILES = 200
_SKIPPED = frozenset({".ipynb_checkpoints", "__MACOSX"})
_MOODLE = re.compile(r"^(?P<who>.+?_\d+)_assignsubmission_[a-z]+_(?P<file>.*)$")
_CANVAS = re.compile(r"^(?P<who>[^_]+)(?:_LATE)?_(?P<number>\d{3,})_\d{3,}_(?P<file>.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a student handed in for one question.

    Attributes:
        answer: the cells that define it; none when it is not there.
        notes: how they were chosen.
        unreadable: why there may be an answer that cannot be read; "" when all was read.
    """

    answer: Answer
    notes: tuple[str, ...] = ()
    unreadable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One student's answers by question, and remarks on the whole."""

    student: str
    handed: Mapping[str, Handed]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submissions:
    """A class: its students, in the order of their names, and the questions that all are graded on."""

    students: tuple[Submission, ...]
    questions: tuple[str, ...]


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


@dataclass(slots=True, kw_only=True)
class _Found:
    """Files of one student, as the folder holds them."""

    paths: list[pathlib.Path] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read(folder: str | os.PathLike[str], questions: Sequence[str] | None = None) -> Submissions:
    """Find students and their answers.

    A student is a folder, with notebooks at any depth, or files such as `s01.ipynb`, `s01_06_ring_and_tree.ipynb` or
    what Moodle and Canvas name them. Links are not followed; checkpoints are left out. The chapter of a notebook is
    told by its cells and its name. Of two notebooks of a chapter the newest that can be read counts.

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
    students = _students(root)
    if not students:
        raise PlanError(f"{root} holds no submission: a student is a folder with notebooks, or a file NAME.ipynb.")
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
            handed={question: _handed(one, read_in[name]) for question, one in known.items()},
            remarks=(*students[name].remarks, *_remarks(read_in[name]), *_alike(name, students)),
        )
        for name in students
    )
    return Submissions(students=tuple(sorted(submissions, key=lambda one: one.student)), questions=tuple(known))


def _students(root: pathlib.Path) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    chapters = sorted(_chapters(), key=len, reverse=True)
    for entry in sorted(os.scandir(root), key=lambda one: one.name):
        if entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        is_notebook = entry.name.endswith(".ipynb")
        if entry.is_symlink() and (is_notebook or entry.is_dir()):
            name = _owner(entry.name, chapters)
            found.setdefault(name, _Found()).remarks.append(f"{shown(entry.name)} is a link: links are not followed.")
        elif entry.is_dir(follow_symlinks=False):
            one = found.setdefault(_owner(entry.name, ()), _Found())
            _collect(pathlib.Path(entry.path), one)
        elif is_notebook:
            found.setdefault(_owner(entry.name, chapters), _Found()).paths.append(pathlib.Path(entry.path))
    return found


def _chapters() -> set[str]:
    return {checks.exercise(question).chapter for question in checks.QUESTIONS}


def _owner(name: str, chapters: Iterable[str]) -> str:
    """Whose a file or folder is, by its name."""
    if match := _MOODLE.match(name):
        return match["who"]
    stem = name.removesuffix(".ipynb")
    if name != stem and (match := _CANVAS.match(stem)):
        return f"{match['who']}_{match['number']}"
    for chapter in chapters:
        who, found, _ = stem.partition(chapter)
        if found and who.rstrip("_- "):
            return who.rstrip("_- ")
    return stem if name != stem and stem else name


def _collect(folder: pathlib.Path, found: _Found) -> None:
    """The notebooks below a student's folder."""

    def failed(error: OSError) -> None:
        found.remarks.append(f"{shown(str(error.filename))} cannot be opened: {error.strerror}.")

    for here, folders, files in os.walk(folder, onerror=failed):
        at = pathlib.Path(here)
        deep = len(at.relative_to(folder).parts) >= MAX_DEPTH
        folders[:] = [] if deep else sorted(one for one in folders if one not in _SKIPPED)
        for name in sorted(files):
            if not name.endswith(".ipynb") or name.startswith("._"):
                continue
            if len(found.paths) == MAX_FILES:
                found.remarks.append(f"it holds more than {MAX_FILES} notebooks: only the first were looked at.")
                return
            found.paths.append(at / name)


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


def _handed(exercise: Exercise, notebooks: Sequence[_Notebook]) -> Handed:
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
        others = [shown(one.path.name) for one in good[:-1]]
        note = [f"{' and '.join([*others, shown(newest.path.name)])} are of one chapter: the newest, the last, counts."]
        return Handed(
            answer=Answer(names=exercise.answers, cells=part.cells), notes=(*(note if others else ()), *part.notes)
        )
    unread = ours or [one for one in notebooks if one.why and not one.chapters]
    if unread:
        return Handed(answer=nothing, unreadable=f"{shown(unread[-1].path.name)} cannot be read: {unread[-1].why}")
    return Handed(answer=nothing)


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
