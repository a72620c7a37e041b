"""The grades of a class: how answers ended, the totals, which criteria are missed, how long it all took."""

import html
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import plotly.graph_objects as go

from labkit.show import palette
from labkit.show.units import duration_text

__all__ = [
    "STATUS_STYLES",
    "StatusStyle",
    "grade_criteria",
    "grade_statuses",
    "grade_times",
    "grade_totals",
    "missed_criteria",
    "was_tried",
]

LEAST_HEIGHT = 340
MAX_BINS = 20
MAX_CRITERIA = 8
LABEL_CHARS = 46
MAX_LABEL_LINES = 3
NOBODY = "no submissions"
NOT_TRIED = "no answer was tried"
# Times that differ more than this are drawn on a logarithmic axis.
WIDE_SPREAD = 8.0


class HasGrades(Protocol):
    """A class's results, as far as these pictures are concerned."""

    @property
    def students(self) -> Sequence[str]:
        """Names."""

    @property
    def questions(self) -> Sequence[str]:
        """Question numbers."""

    @property
    def results(self) -> Mapping[tuple[str, str], Any]:
        """By (student, question): status, score, max_score, earned, seconds."""

    @property
    def max_score(self) -> int:
        """All points of all questions."""

    def score(self, student: str) -> int:
        """A student's points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusStyle:
    """How a status is drawn: never by its colour alone, but also by a pattern in bars and a sign in text."""

    label: str
    color: str
    pattern: str
    sign: str
    ink: str = "#ffffff"


STATUS_STYLES: dict[str, StatusStyle] = {
    "full": StatusStyle(label="full marks", color="#009E73", pattern="", sign="✓"),
    "partial": StatusStyle(label="partial", color="#E69F00", pattern="/", sign="◐", ink=palette.INK),
    "wrong": StatusStyle(label="wrong", color="#D55E00", pattern="x", sign="✗"),
    "error": StatusStyle(label="error", color="#CC79A7", pattern="\\", sign="!", ink=palette.INK),
    "timeout": StatusStyle(label="timeout", color="#0072B2", pattern="-", sign="∞"),
    "crashed": StatusStyle(label="crashed", color="#7A5195", pattern="+", sign="†"),
    "unsolved": StatusStyle(label="unsolved", color="#9AA3AD", pattern=".", sign="○", ink=palette.INK),
    "missing": StatusStyle(label="missing", color="#5B6770", pattern="|", sign="–"),
}


def grade_statuses(grades: HasGrades) -> go.Figure:
    """Draw how the answers to each question ended: one bar for each question, one part for each status."""
    figure = go.Figure()
    of = {question: _of(grades, question) for question in grades.questions}
    for status, style in STATUS_STYLES.items():
        counts = [sum(one.status == status for one in results) for results in of.values()]
        if any(counts):
            figure.add_trace(
                go.Bar(
                    orientation="h",
                    name=style.label,
                    y=list(of),
                    x=counts,
                    text=[str(count) if count else "" for count in counts],
                    textposition="inside",
                    textangle=0,
                    insidetextanchor="middle",
                    insidetextfont={"color": style.ink, "size": 12},
                    marker=_marker(style),
                    hovertemplate=f"<b>%{{y}}</b><br>%{{x}} {style.label}<extra></extra>",
                )
            )
    full = sum(one.status == "full" for results in of.values() for one in results)
    notes = [f"full marks for {full} of {sum(len(one) for one in of.values())} answers"]
    palette.dress(figure, title="How each question ended", notes=notes, height=_height(len(of)))
    figure.update_layout(barmode="stack", bargap=0.35, showlegend=True, margin_t=72)
    # Below, where rows of a wrapped legend have room whatever the width.
    figure.update_layout(legend={"traceorder": "normal", "yref": "container", "y": 0.02, "yanchor": "bottom"})
    figure.update_xaxes(title={"text": "students"}, range=[0, max(1, len(grades.students))], **_whole_ticks(grades))
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    if not figure.data:
        _empty(figure, NOBODY)
    return figure


def grade_totals(grades: HasGrades) -> go.Figure:
    """Draw how many students have how many points."""
    totals = [grades.score(student) for student in grades.students]
    most = max(grades.max_score, 1)
    width = max(1, math.ceil(most / MAX_BINS))
    starts = range(0, most + 1, width)
    counts = [sum(start <= total < start + width for total in totals) for start in starts]
    spans = [str(start) if width == 1 else f"{start} to {min(start + width - 1, most)}" for start in starts]
    figure = go.Figure(
        go.Bar(
            x=[start + (width - 1) / 2 for start in starts],
            y=counts,
            width=width * 0.9,
            customdata=spans,
            marker={"color": palette.RANK_COLORS[0], "line": {"width": 0}},
            hovertemplate="<b>%{customdata} points</b><br>%{y} students<extra></extra>",
        )
    )
    notes = [NOBODY]
    if totals:
        notes = [f"mean {statistics.fmean(totals):.1f}, median {statistics.median(totals):g} of {most} points"]
        figure.add_vline(x=statistics.fmean(totals), line={"color": palette.MUTED, "width": 1.5, "dash": "dash"})
        figure.add_annotation(
            x=statistics.fmean(totals), y=1, yref="paper", yanchor="bottom", text="mean", showarrow=False,
            font={"size": 11, "color": palette.MUTED},
        )  # fmt: skip
    palette.dress(figure, title="Totals", notes=notes, height=LEAST_HEIGHT)
    figure.update_xaxes(title={"text": "points"}, range=[-width * 0.6, most + width * 0.6])
    figure.update_yaxes(title={"text": "students"}, rangemode="tozero", dtick=_whole_step(max(counts, default=0)))
    figure.update_layout(margin_t=84)
    if not totals:
        _empty(figure, NOBODY)
    return figure


def grade_criteria(grades: HasGrades) -> go.Figure:
    """Draw which criteria are missed most, by those whose answers were tried."""
    tried = missed_criteria(grades)
    missed = [one for one in tried if one[2]][:MAX_CRITERIA]
    nothing = "no criterion was missed" if tried else NOT_TRIED
    labels = [_label(f"{question} · {text}") for question, text, _, _ in missed]
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=list(range(len(missed))),
            x=[count / of * 100 for _, _, count, of in missed],
            text=[f"{count} of {of}" for _, _, count, of in missed],
            textposition="auto",
            insidetextanchor="end",
            textangle=0,
            customdata=[html.escape(f"{question} {text}".replace("`", "")) for question, text, _, _ in missed],
            marker={"color": palette.RANK_COLORS[5], "line": {"width": 0}},
            insidetextfont={"color": "#ffffff", "size": 12},
            hovertemplate="<b>%{customdata}</b><br>missed by %{text}<extra></extra>",
        )
    )
    notes = ["share of the students whose answer was tried" if missed else nothing]
    palette.dress(
        figure,
        title="Criteria missed most",
        notes=notes,
        height=_height(sum(1 + label.count("<br>") / 2 for label in labels)),
    )
    figure.update_layout(bargap=0.35, margin_t=72)
    figure.update_xaxes(title={"text": "missed by (%)"}, range=[0, 100])
    figure.update_yaxes(
        tickvals=list(range(len(missed))), ticktext=labels, automargin=True, range=[len(missed) - 0.5, -0.5],
        showgrid=False,
    )  # fmt: skip
    if not missed:
        _empty(figure, nothing)
    return figure


def grade_times(grades: HasGrades) -> go.Figure:
    """Draw how long each answer took to be tried: a dot for each student, a line at the question's median."""
    figure = go.Figure()
    times = []
    for question in grades.questions:
        taken = [(student, grades.results[student, question]) for student in grades.students]
        taken = [(student, one) for student, one in taken if was_tried(one) and one.seconds > 0]
        times += [one.seconds for _, one in taken]
        figure.add_trace(
            go.Box(
                name=question,
                y=[one.seconds for _, one in taken],
                x=[question] * len(taken),
                text=[f"{html.escape(_printable(student))}: {one.status}" for student, one in taken],
                boxpoints="all",
                pointpos=0,
                jitter=0.5,
                fillcolor="rgba(0,0,0,0)",
                line={"color": palette.MUTED, "width": 1},
                marker={"color": palette.RANK_COLORS[0], "size": 7, "opacity": 0.85},
                hoveron="points",
                hovertemplate="<b>%{text}</b><br>%{y:.3~g} s<extra></extra>",
            )
        )
    notes = [NOT_TRIED]
    if times:
        notes = [f"median {duration_text(statistics.median(times))}, longest {duration_text(max(times))}"]
    palette.dress(figure, title="Time per question", notes=notes, height=LEAST_HEIGHT)
    figure.update_layout(showlegend=False, margin_t=72)
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(grades.questions), showgrid=False)
    figure.update_yaxes(title={"text": "seconds"}, rangemode="tozero")
    if times and max(times) > WIDE_SPREAD * min(times):
        ticks = [digit * 10.0**power for power in range(-4, 6) for digit in (1, 2, 5)]
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    if not times:
        _empty(figure, NOT_TRIED)
    return figure


def was_tried(result: Any) -> bool:
    """Whether there was an answer to try; one that is unsolved or missing says nothing of what is difficult or slow."""
    return result.status not in ("unsolved", "missing")


def missed_criteria(grades: HasGrades) -> list[tuple[str, str, int, int]]:
    """Return (question, criterion's text, missed, tried) for every criterion, the most missed first."""
    counts: dict[tuple[str, str], list[int]] = {}
    for question in grades.questions:
        for one in _of(grades, question):
            if not was_tried(one):
                continue
            for _, text, points, most in one.earned:
                count = counts.setdefault((question, text), [0, 0])
                count[0] += points < most
                count[1] += 1
    rows = [(question, text, missed, tried) for (question, text), (missed, tried) in counts.items()]
    return sorted(rows, key=lambda row: -row[2] / row[3])


def _of(grades: HasGrades, question: str) -> list[Any]:
    return [grades.results[student, question] for student in grades.students]


def _marker(style: StatusStyle) -> dict[str, Any]:
    pattern = {"shape": style.pattern, "fgcolor": "rgba(255,255,255,0.35)", "size": 7, "solidity": 0.25}
    return {"color": style.color, "line": {"width": 0}, "pattern": pattern}


def _whole_ticks(grades: HasGrades) -> dict[str, Any]:
    return {"dtick": _whole_step(len(grades.students)), "tickformat": "d"}


def _whole_step(most: int) -> int:
    """The step between ticks, so that about ten whole numbers stand on an axis."""
    return next(step * 10**power for power in range(9) for step in (1, 2, 5) if step * 10**power * 10 >= most)


def _height(rows: float) -> int:
    return max(LEAST_HEIGHT, 116 + math.ceil(28 * rows))


def _label(text: str) -> str:
    """A label for an axis: in lines, none of its text is markup."""
    text = _printable(text).replace("`", "").rstrip(".")
    lines = textwrap.wrap(text, LABEL_CHARS, max_lines=MAX_LABEL_LINES, placeholder=" …")
    return "<br>".join(map(html.escape, lines))


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text[:200])


def _empty(figure: go.Figure, text: str) -> None:
    figure.add_annotation(
        text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font={"color": palette.MUTED, "size": 14}
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
