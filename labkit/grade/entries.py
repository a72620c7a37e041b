"""Who handed in files: the entries of a folder of submissions, however a platform names them. No notebook is opened."""

import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from labkit.errors import listed
from labkit.grade.reading import shown

__all__ = ["Entries", "Found", "few", "look"]

MAX_DEPTH = 8
MAX_FILES = 200
MAX_NAMED = 4
MAX_NAME_CHARS = 60
_SKIPPED = frozenset({".ipynb_checkpoints", "__MACOSX"})
_MOODLE = re.compile(r"^(?P<who>.+?_\d+)_assignsubmission_[a-z]+_(?P<file>.*)$")
_CANVAS = re.compile(r"^(?P<who>[^_]+)(?:_LATE)?_(?P<number>\d{3,})_\d{3,}_(?P<file>.+)$")
_ARCHIVE = re.compile(r"(\.tar)?\.(7z|bz2|gz|rar|tar|tbz2|tgz|txz|xz|zip|zst)$", re.IGNORECASE)
# Files beside the submissions that are a teacher's, or a file manager's: lists, notes, thumbnails.
_HARMLESS = re.compile(r"^(readme|thumbs\.db|desktop\.ini)|\.(csv|tsv|xlsx?|ods|md|txt)$", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Found:
    """What one student handed in.

    Attributes:
        paths: notebooks.
        remarks: what is to be said of it.
        is_folder: whether it is a folder, or several.
        beside: names of the other files in it.
        files: names of files outside any folder that are no notebooks.
    """

    paths: list[pathlib.Path] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    is_folder: bool = False
    beside: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """What a folder of submissions holds.

    Attributes:
        students: by name; one without a notebook has a remark that says what is there instead.
        strays: names of files that are no student's and were not looked at, without those that are plainly a teacher's.
    """

    students: dict[str, Found]
    strays: tuple[str, ...]


def look(root: pathlib.Path, chapters: Iterable[str]) -> Entries:
    """Find the students of a folder.

    A student is a folder, a notebook, an archive, or any file with a name that Moodle or Canvas made.

    Args:
        root: the folder.
        chapters: stems of notebooks, which are no part of a student's name.
    """
    students: dict[str, Found] = {}
    chapters = sorted(chapters, key=len, reverse=True)
    others = []
    for entry in sorted(os.scandir(root), key=lambda one: one.name):
        if entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        is_notebook = entry.name.endswith(".ipynb")
        if entry.is_symlink() and (is_notebook or entry.is_dir()):
            name = _owner(entry.name, chapters)
            students.setdefault(name, Found()).remarks.append(f"{shown(entry.name)} is a link: links are not followed.")
        elif entry.is_dir(follow_symlinks=False):
            _collect(pathlib.Path(entry.path), students.setdefault(_owner(entry.name, ()), Found()))
        elif is_notebook:
            students.setdefault(_owner(entry.name, chapters), Found()).paths.append(pathlib.Path(entry.path))
        else:
            others.append(entry.name)
    strays = tuple(_share_out(others, students, chapters))
    for one in students.values():
        one.remarks += [] if one.paths else _instead(one)
    return Entries(students=students, strays=strays)


def few(names: Sequence[str]) -> str:
    """The first few of many names, and how many more there are."""
    told = [shown(name, most=MAX_NAME_CHARS) for name in names[:MAX_NAMED]]
    left = len(names) - len(told)
    return listed([*told, *([f"{left} more"] if left else [])])


def _share_out(names: Iterable[str], students: dict[str, Found], chapters: Sequence[str]) -> Iterator[str]:
    """Give files that are no notebooks to those who handed in nothing else; the rest are strays."""
    for name in names:
        stem = _ARCHIVE.sub("", name)
        is_handed_in = stem != name or _MOODLE.match(name) or _CANVAS.match(name)
        owner = _owner(f"{stem}.ipynb", chapters)
        if is_handed_in and not (owner in students and students[owner].paths):
            students.setdefault(owner, Found()).files.append(name)
        elif is_handed_in or not _HARMLESS.search(name):
            yield name


def _instead(one: Found) -> Iterator[str]:
    """What is there in place of a notebook."""
    for name in one.files:
        fix = "unpack it into a folder" if _ARCHIVE.search(name) else "a file NAME.ipynb is"
        yield f"{shown(name)} is not a notebook: {fix}."
    if one.is_folder and one.beside:
        fix = "; unpack what is packed" if any(map(_ARCHIVE.search, one.beside)) else ""
        yield f"no notebook in this folder: it holds {few(one.beside)}{fix}."
    elif one.is_folder and not one.remarks:
        yield "no notebook in this folder, and no other file."


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


def _collect(folder: pathlib.Path, found: Found) -> None:
    """The notebooks below a student's folder, and the names of the other files."""

    def failed(error: OSError) -> None:
        found.remarks.append(f"{shown(str(error.filename))} cannot be opened: {error.strerror}.")

    found.is_folder = True
    for here, folders, files in os.walk(folder, onerror=failed):
        at = pathlib.Path(here)
        deep = len(at.relative_to(folder).parts) >= MAX_DEPTH
        folders[:] = [] if deep else sorted(one for one in folders if one not in _SKIPPED)
        for name in sorted(files):
            if not name.endswith(".ipynb") or name.startswith("._"):
                if not name.startswith(".") and len(found.beside) < MAX_FILES:
                    found.beside.append(name)
                continue
            if len(found.paths) == MAX_FILES:
                found.remarks.append(f"it holds more than {MAX_FILES} notebooks: only the first were looked at.")
                return
            found.paths.append(at / name)
