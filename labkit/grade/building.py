"""Writes the folder of exercises from the folder of solutions, and says where the two differ."""

import os
import pathlib
import tempfile
from dataclasses import dataclass

from labkit.errors import PlanError
from labkit.grade.stripping import strip

__all__ = ["Difference", "build", "differences", "write_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An exercise that is not what its solution makes of it.

    Attributes:
        name: the notebook's file name.
        text: what it should hold; None when there is no solution of this name.
        how: "missing", "different" or "has no solution".
    """

    name: str
    text: str | None
    how: str


def differences(solutions: pathlib.Path, exercises: pathlib.Path) -> tuple[Difference, ...]:
    """Compare the two folders.

    Raises:
        PlanError: there are no solutions, or one of them cannot be stripped; it is named.
    """
    sources = sorted(solutions.glob("*.ipynb"))
    if not sources:
        raise PlanError(f"{solutions} holds no notebook: exercises are made from solutions/NN_topic.ipynb.")
    found = []
    for source in sources:
        try:
            wanted = strip(source)
        except PlanError as error:
            raise PlanError(f"{source}: {error}") from None
        target = exercises / source.name
        have = target.read_text(encoding="utf-8") if target.is_file() else None
        if have != wanted:
            found.append(Difference(name=source.name, text=wanted, how="missing" if have is None else "different"))
    names = {source.name for source in sources}
    orphans = [path.name for path in sorted(exercises.glob("*.ipynb")) if path.name not in names]
    return (*found, *(Difference(name=name, text=None, how="has no solution") for name in orphans))


def build(solutions: pathlib.Path, exercises: pathlib.Path) -> tuple[Difference, ...]:
    """Write the exercises that are missing or different; returns what was found. One without a solution stays.

    Raises:
        PlanError: there are no solutions, or one of them cannot be stripped; nothing was written then.
    """
    found = differences(solutions, exercises)
    exercises.mkdir(exist_ok=True)
    for one in found:
        if one.text is not None:
            write_text(exercises / one.name, one.text, mode=0o644)
    return found


def write_text(path: pathlib.Path, text: str, *, mode: int = 0o600) -> None:
    """Write a file so that whoever reads it sees the old text or the new one, never a part."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".draft")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, mode)
        os.replace(draft, path)
    except BaseException:
        pathlib.Path(draft).unlink(missing_ok=True)
        raise
