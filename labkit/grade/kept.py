"""Results that are finished already, kept one file each, so that a batch goes on where it was ended."""

import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import labkit
from labkit.exercise import CaseResult, Idea, Measure, Result
from labkit.grade.building import write_text
from labkit.grade.limits import Limits
from labkit.grade.submissions import Handed

__all__ = ["Kept"]

# What decides a result besides the answer: a change in any of it makes kept results void.
_DECIDE = ("checks", "exercise", "rank/trials", "trial")


class Kept:
    """Results in a folder, by what they depend on; whoever changes an answer, a check or a limit gets a new one."""

    def __init__(self, folder: pathlib.Path, *, seed: int, limits: Limits, sandbox: str) -> None:
        self._folder = folder
        self._beside = [seed, asdict(limits), sandbox, labkit.__version__, _sources()]
        folder.mkdir(mode=0o700, exist_ok=True)
        for draft in folder.glob(".*.draft"):  # of a batch that was killed while it wrote
            draft.unlink(missing_ok=True)

    def find(self, student: str, question: str, handed: Handed) -> Result | None:
        """The result, if it is there whole."""
        try:
            return _result(json.loads(self._path(student, question, handed).read_text(encoding="ascii")))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep(self, student: str, question: str, handed: Handed, result: Result) -> None:
        """Keep a result, at once and whole."""
        write_text(self._path(student, question, handed), json.dumps(result.to_plain()))

    def _path(self, student: str, question: str, handed: Handed) -> pathlib.Path:
        answer = [handed.answer.names, handed.answer.cells, handed.notes, handed.unreadable, handed.absent]
        plain = [student, question, *answer]
        digest = hashlib.sha256(json.dumps([plain, self._beside], sort_keys=True).encode("ascii")).hexdigest()
        return self._folder / f"{digest}.json"


@functools.cache
def _sources() -> str:
    package = pathlib.Path(labkit.__file__).parent
    digest = hashlib.sha256()
    for name in _DECIDE:
        for path in sorted((package / name).rglob("*.py")):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _result(plain: Mapping[str, Any]) -> Result:
    fields = dict(plain)
    fields["idea"] = None if plain["idea"] is None else Idea(**plain["idea"])
    fields["cases"] = tuple(map(_case, plain["cases"]))
    fields["earned"] = tuple(map(tuple, plain["earned"]))
    fields["notes"] = tuple(plain["notes"])
    return Result(**fields)


def _case(plain: Mapping[str, Any]) -> CaseResult:
    fields = dict(plain)
    fields["waits"] = tuple(map(tuple, plain["waits"]))
    fields["measures"] = tuple(Measure(**one) for one in plain["measures"])
    return CaseResult(**fields)
