"""The card of a check: one box that says what passed, what came instead, where, and what to think about."""

import html
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from labkit.exercise import CaseResult, Measure, Result
from labkit.grade.texts import code_marked, plain
from labkit.show.units import duration_text, traffic_text

__all__ = ["Checked", "State"]

State = Literal["passed", "not yet", "error", "stopped"]

# White on each of them is well read; the rest of the card takes the page's own ink, so that dark pages work too.
_TONES = {"passed": "#0a7d4f", "not yet": "#b45309", "error": "#b3261e", "stopped": "#57606a"}
_FAINT = "rgba(127,127,127,0.14)"
_LINE = "rgba(127,127,127,0.35)"
_OVER = "#d9480f"
_KEPT = "#109a63"
_MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12.5px"
_WRAP = "white-space:pre-wrap;overflow-wrap:anywhere"

MAX_CHARS = 600
MAX_WAITS = 8
MAX_MEASURES = 8
TEXT_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(Result):
    """A result of `check`, which a notebook shows as a card and a terminal as the same in text.

    Attributes:
        state: what stands on the card: passed, not yet, error (it raised or crashed, or the check could not be made) or
            stopped (by the stop button).
        num_cases: how many visible cases there are; those behind the first failure were not tried.
        num_failures: how often an answer to this question failed in this kernel; from 2 on the further hint is shown.
    """

    state: State
    num_cases: int = 0
    num_failures: int = 0

    def __repr__(self) -> str:
        head = f"{self._name()}: {self.state}"
        if told := self._count():
            head += f" ({told})"
        lines = [
            head,
            *textwrap.wrap(plain(_cut(self.message)), TEXT_WIDTH, initial_indent="  ", subsequent_indent="  "),
        ]
        measures = [(_measure_name(one), _measure_text(one)) for one in self._measures()]
        advice = [(label, plain(text)) for label, text in self._advice()]
        for rows in (list(self._facts()), measures, advice):
            lines += _text_rows(rows)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        tone = _TONES[self.state]
        parts = [_head(tone, self.state, self._name(), self._count())]
        parts.append(f"<div style='margin:8px 0 0;line-height:1.5;{_WRAP}'>{code_marked(_cut(self.message))}</div>")
        parts.append(_grid([_row(label, text, mono=True) for label, text in self._facts()]))
        parts.append(_grid([_measure_row(one) for one in self._measures()]))
        parts.append(_grid([_row(label, text, mono=False) for label, text in self._advice()], ruled=True))
        style = f"border:1px solid {_LINE};border-left:4px solid {tone};border-radius:6px;padding:10px 14px 11px;"
        return (
            f"<div style='{style}max-width:860px;margin:4px 0;font-size:13.5px;line-height:1.45'>{''.join(parts)}</div>"
        )

    def _name(self) -> str:
        return _cut(f"{self.question} {self.title}".strip())

    def _count(self) -> str:
        """How many cases passed, in how long."""
        if not self.cases or not self.num_cases:
            return ""
        passed = sum(one.passed for one in self.cases)
        text = f"{passed} of {self.num_cases} case{'s' * (self.num_cases != 1)}"
        return f"{text} · {duration_text(self.seconds)}" if self.seconds else text

    def _facts(self) -> Iterator[tuple[str, str]]:
        """The smallest case that failed, and where."""
        failed = self.first_failure
        if failed is None or failed.outcome in ("missing", "unsolved"):
            return
        yield "case", failed.name
        for label, text in (("input", failed.given), ("got", failed.got), ("wanted", failed.wanted)):
            if text:
                yield label, text
        if failed.where:
            yield "where", failed.where
        yield from _waits(failed)

    def _measures(self) -> tuple[Measure, ...]:
        """Of the case that failed, or else of the largest that measured something."""
        failed = self.first_failure
        if failed is not None:
            return failed.measures[:MAX_MEASURES]
        return next((one.measures for one in reversed(self.cases) if one.measures), ())[:MAX_MEASURES]

    def _advice(self) -> Iterator[tuple[str, str]]:
        """The idea to revisit, the further hint from the second failure on, and remarks."""
        if self.idea is not None:
            yield "revisit", self.idea.first
            if self.num_failures > 1 and self.idea.further:
                yield "hint", self.idea.further
        for note in self.notes:
            yield "note", note


def _text_rows(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Labels in one column, texts beside them, wrapped."""
    width = max((len(label) for label, _ in rows), default=0)
    for label, text in rows:
        for line in _cut(text).split("\n"):
            for part in textwrap.wrap(line, TEXT_WIDTH - width) or [""]:
                yield f"  {label.ljust(width)}  {part}".rstrip()
                label = ""


def _waits(failed: CaseResult) -> Iterator[tuple[str, str]]:
    for rank, doing, where in failed.waits[:MAX_WAITS]:
        yield f"rank {rank}", f"{doing} at {where}" if where else doing


def _measure_name(one: Measure) -> str:
    return _cut(one.name)


def _measure_text(one: Measure) -> str:
    value = _number(one.value, one.unit)
    if one.budget is None:
        return value
    return f"{value} of at most {_number(one.budget, one.unit)}{'' if one.kept else ': over'}"


def _number(value: float, unit: str) -> str:
    if unit == "B":
        return traffic_text(value)
    if unit == "s":
        return duration_text(value)
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"
    return f"{text} {unit}".strip()


def _head(tone: str, state: str, name: str, count: str) -> str:
    pill = f"background:{tone};color:#ffffff;border-radius:10px;padding:2px 10px;font-size:12px;font-weight:600"
    return (
        "<div style='display:flex;flex-wrap:wrap;align-items:center;gap:4px 10px'>"
        f"<span style='{pill}'>{state}</span><span style='font-weight:600'>{html.escape(name)}</span>"
        f"<span style='margin-left:auto;opacity:0.7;font-size:12.5px'>{html.escape(count)}</span></div>"
    )


def _grid(rows: list[str], *, ruled: bool = False) -> str:
    if not rows:
        return ""
    rule = f";border-top:1px solid {_LINE};padding-top:8px" if ruled else ""
    style = f"display:grid;grid-template-columns:max-content minmax(0,1fr);gap:4px 14px;margin-top:9px{rule}"
    return f"<div style='{style}'>{''.join(rows)}</div>"


def _row(label: str, text: str, *, mono: bool) -> str:
    look = f"{_MONO};background:{_FAINT};border-radius:3px;padding:1px 6px;justify-self:start" if mono else ""
    # What the answer gave stands as it is; sentences have code in them.
    inner = html.escape(_cut(text)) if mono else code_marked(_cut(text))
    return f"{_label(label)}<div style='{_WRAP};{look}'>{inner}</div>"


def _label(text: str) -> str:
    return f"<div style='opacity:0.7;font-size:12.5px;max-width:260px;padding-top:1px'>{html.escape(text)}</div>"


def _measure_row(one: Measure) -> str:
    """A bar up to the budget; what is over it is drawn beyond the mark, in another colour."""
    text = html.escape(_measure_text(one))
    if one.budget is None:
        return f"{_label(_measure_name(one))}<div>{text}</div>"
    color, sign = (_KEPT, "✓") if one.kept else (_OVER, "✗")
    most = max(one.value, one.budget, 1e-12)
    filled, mark = (round(100 * max(0.0, part) / most, 1) for part in (one.value, one.budget))
    bar = (
        f"<span style='position:relative;display:inline-block;width:120px;height:8px;background:{_FAINT};"
        f"border-radius:4px'><span style='position:absolute;left:0;top:0;height:8px;width:{filled}%;"
        f"background:{color};border-radius:4px'></span><span style='position:absolute;left:calc({mark}% - 1px);"
        "top:-3px;width:2px;height:14px;background:currentColor;opacity:0.6'></span></span>"
    )
    return (
        f"{_label(_measure_name(one))}<div style='display:flex;flex-wrap:wrap;align-items:center;gap:2px 10px'>{bar}"
        f"<span>{text}</span><span style='color:{color};font-weight:700'>{sign}</span></div>"
    )


def _cut(text: str) -> str:
    """A text of readable length, without control characters that a terminal would obey."""
    clean = "".join(one if one.isprintable() or one == "\n" else " " for one in str(text)[: 2 * MAX_CHARS])
    left = len(str(text)) - MAX_CHARS
    return clean if left <= 0 else f"{clean[:MAX_CHARS]} ... ({left} characters more)"
