"""Takes from a notebook what defines an answer: its statements and, transitively, those that bind what they need.

Nothing else of the notebook is run by the grader: not the cells that start ranks, draw pictures or try the answer out.
Each cell keeps its lines, the unneeded ones blank, so that a traceback names the line that the learner sees.
"""

import builtins
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.grade.reading import CodeCell
from labkit.grade.statements import Statement, statements_of

__all__ = ["Slice", "defines", "functions", "slice_answer"]

_CHECK = re.compile(r"^(.*-)?(check|try|text)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What the grader runs of a notebook.

    Attributes:
        cells: name and source of cells, in document order; none when the answer is not there.
        notes: what a person should know of how they were chosen.
    """

    cells: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A statement and the cell it stands in."""

    cell: CodeCell
    statement: Statement


def defines(cells: Iterable[CodeCell], question: str, names: Iterable[str]) -> bool:
    """Whether a notebook is one for the question: it has a cell of it, or defines an answer."""
    wanted = set(names)
    return any(_is_of(cell, question) or wanted & _text_defines(cell, wanted) for cell in cells)


def functions(cells: Iterable[CodeCell]) -> list[str]:
    """The names of the functions that cells define, by the look of their text, each once and in order."""
    found = (re.findall(r"^(?:async +)?def +(\w+)", cell.source, re.MULTILINE) for cell in cells)
    return list(dict.fromkeys(name for names in found for name in names))


def slice_answer(cells: Sequence[CodeCell], question: str, names: Sequence[str]) -> Slice:
    """Choose what defines the answers.

    Args:
        cells: the code cells of a notebook.
        question: such as "06.1"; the ids of its cells begin with "q06-1".
        names: the functions that the exercise asks for.
    """
    parsed = [(cell, *statements_of(cell.source)) for cell in cells]
    places = [_Place(cell=cell, statement=one) for cell, found, _ in parsed for one in found or ()]
    broken = [cell for cell, found, _ in parsed if found is None]
    notes: list[str] = []
    chosen: list[_Place] = []
    whole: list[CodeCell] = []
    for name in names:
        own = [one for one in places if name in one.statement.binds]
        unread = [cell for cell in broken if _text_defines(cell, {name})]
        counting, note = _counting(name, own, unread)
        notes += note
        if isinstance(counting, CodeCell):
            whole.append(counting)
        else:
            chosen += counting
    if not chosen and not whole:
        whole = [cell for cell in broken if _is_of(cell, question)][-1:]
        chosen = [one for one in places if _is_of(one.cell, question) and one.statement.raises]
    chosen = _with_needs(chosen, places, set(names))
    texts = {cell.number: (cell.name, text) for cell, _, text in parsed}
    return Slice(cells=tuple(_cut(chosen, whole, texts)), notes=(*notes, *_magics(chosen, cells, texts)))


def _counting(name: str, own: list[_Place], unread: list[CodeCell]) -> tuple[CodeCell | list[_Place], list[str]]:
    """Of all cells that define an answer, the last one that is not the stub, and a note when there are several."""
    numbers = sorted({one.cell.number for one in own} | {cell.number for cell in unread})
    solved = sorted({one.cell.number for one in own if not one.statement.is_stub} | {cell.number for cell in unread})
    if not numbers:
        return [], []
    last = (solved or numbers)[-1]
    note = []
    if len(numbers) > 1:
        listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        note.append(f"{name} is defined in cells {listed}: cell {last} counts.")
    for cell in unread:
        if cell.number == last:
            return cell, note
    counting = [one for one in own if one.cell.number == last]
    earlier = [one for one in own if one.cell.number < last]
    if earlier and name in counting[0].statement.needs_now:  # f = timed(f): the one before counts too
        return [*[one for one in earlier if one.cell.number == earlier[-1].cell.number], *counting], note
    return counting, note


def _with_needs(chosen: list[_Place], places: Sequence[_Place], answers: set[str]) -> list[_Place]:
    """Add every statement that binds a name which the chosen ones need; answers are chosen already."""
    done, waiting = set(answers), [name for one in chosen for name in one.statement.needs]
    taken = list(chosen)
    bound = {name for one in places for name in one.statement.binds}
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        unknown = name not in bound and not hasattr(builtins, name)
        for one in places:
            if (name in one.statement.binds or (unknown and one.statement.binds_all)) and one not in taken:
                taken.append(one)
                waiting += one.statement.needs
    if taken:
        taken += [one for one in places if one.statement.is_future and one not in taken]
        taken += _filling(done - answers, places, taken)
    return taken


def _filling(names: set[str], places: Sequence[_Place], taken: Sequence[_Place]) -> Iterable[_Place]:
    """Statements that fill what is needed by its methods, as `SIZES.append(2)` does, and need nothing else for it."""
    imported = {name for one in places if one.statement.is_import for name in one.statement.binds}
    for one in places:
        statement = one.statement
        own = statement.calls_on in names - imported
        if own and one not in taken and all(name in names or hasattr(builtins, name) for name in statement.needs):
            yield one


def _cut(
    chosen: Sequence[_Place], whole: Sequence[CodeCell], texts: dict[int, tuple[str, str]]
) -> Iterable[tuple[str, str]]:
    lines: dict[int, set[int]] = {}
    for one in chosen:
        lines.setdefault(one.cell.number, set()).update(range(one.statement.first, one.statement.last + 1))
    unbroken = {cell.number: cell for cell in whole}
    for number in sorted({*lines, *unbroken}):
        name, text = texts[number]
        if number in unbroken:
            yield name, text
            continue
        kept = [line if at in lines[number] else "" for at, line in enumerate(text.split("\n"), start=1)]
        part = "\n".join(kept).rstrip() + "\n"
        # Two statements on one line, one of them going on below: then the lines do not part.
        yield name, part if statements_of(part)[0] is not None else text


def _magics(chosen: Sequence[_Place], cells: Sequence[CodeCell], texts: dict[int, tuple[str, str]]) -> Iterable[str]:
    used = {one.cell.number for one in chosen}
    for cell in cells:
        if cell.number in used and texts[cell.number][1] != cell.source:
            yield f"cell {cell.number}: its IPython commands were left out."


def _is_of(cell: CodeCell, question: str) -> bool:
    prefix = f"q{question.replace('.', '-')}"
    return any((one == prefix or one.startswith(f"{prefix}-")) and not _CHECK.match(one) for one in cell.ids)


def _text_defines(cell: CodeCell, names: set[str]) -> set[str]:
    """The names that a cell defines by the look of its text; also of a cell that is not Python."""
    return set(re.findall(r"^(?:async +)?(?:def|class) +(\w+)", cell.source, re.MULTILINE)) & names | {
        name for name in names if re.search(rf"^{re.escape(name)} *(?::[^=\n]*)?=(?!=)", cell.source, re.MULTILINE)
    }
