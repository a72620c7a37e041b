"""The pictures of a class say what its results say."""

import dataclasses

import pytest

from labkit import show
from labkit.exercise import Gradebook, Result, Status
from labkit.show.grades import MAX_CRITERIA, STATUS_STYLES, missed_criteria

STATUSES = ("full", "partial", "wrong", "unsolved", "missing", "error", "timeout", "crashed")


def result(question: str, status: Status, score: int, seconds: float) -> Result:
    earned = (("sum", "<b>the sum</b>.", min(score, 4), 4), ("any", "any size.", max(score - 4, 0), 6))
    return Result(
        question=question,
        title="ring",
        status=status,
        score=score,
        max_score=10,
        message="one sentence",
        earned=() if status == "missing" else earned,
        seconds=seconds,
    )


@pytest.fixture
def book() -> Gradebook:
    """Three students: full marks, four points, nothing handed in; and a second question that nobody solved."""
    first = {"s01": ("full", 10, 1.0), "s02": ("partial", 4, 2.0), "<i>s03": ("unsolved", 0, 0.1)}
    results = {(student, "06.1"): result("06.1", *how) for student, how in first.items()}
    results |= {(student, "06.2"): result("06.2", "timeout", 0, 20.0) for student in first}
    return Gradebook(students=tuple(first), questions=("06.1", "06.2"), results=results)


@pytest.fixture
def nobody() -> Gradebook:
    return Gradebook(students=(), questions=("06.1",), results={})


def test_every_status_is_told_apart_without_its_colour() -> None:
    assert set(STATUS_STYLES) == set(STATUSES)
    for field in dataclasses.fields(next(iter(STATUS_STYLES.values()))):
        if field.name != "ink":
            assert len({getattr(one, field.name) for one in STATUS_STYLES.values()}) == len(STATUSES), field.name


def test_statuses_are_counted_by_question(book: Gradebook) -> None:
    figure = show.grade_statuses(book)
    bars = {bar.name: dict(zip(bar.y, bar.x, strict=True)) for bar in figure.data}
    assert bars == {
        "full marks": {"06.1": 1, "06.2": 0},
        "partial": {"06.1": 1, "06.2": 0},
        "timeout": {"06.1": 0, "06.2": 3},
        "unsolved": {"06.1": 1, "06.2": 0},
    }
    assert "full marks for 1 of 6 answers" in figure.layout.title.text


def test_totals_are_counted_once_each(book: Gradebook) -> None:
    (bars,) = show.grade_totals(book).data
    assert sum(bars.y) == 3
    assert {x: y for x, y in zip(bars.x, bars.y, strict=True) if y} == {0: 1, 4: 1, 10: 1}


@pytest.mark.parametrize("most", [1, 10, 50, 170, 1000])
def test_bins_of_totals_cover_every_total(most: int) -> None:
    scores = sorted({0, 1, most // 3, most - 1, most})
    results = {
        (f"s{score}", "q"): Result(question="q", title="", status="wrong", score=score, max_score=most, message="m")
        for score in scores
    }
    book = Gradebook(students=tuple(f"s{score}" for score in scores), questions=("q",), results=results)
    (bars,) = show.grade_totals(book).data
    assert sum(bars.y) == len(scores)
    assert len(bars.x) <= 21


def test_criteria_count_only_answers_that_were_tried(book: Gradebook) -> None:
    assert missed_criteria(book) == [
        ("06.2", "<b>the sum</b>.", 3, 3),
        ("06.2", "any size.", 3, 3),
        ("06.1", "any size.", 1, 2),
        ("06.1", "<b>the sum</b>.", 0, 2),
    ]
    figure = show.grade_criteria(book)
    assert list(figure.data[0].x) == [100, 100, 50]
    assert len(figure.data[0].x) <= MAX_CRITERIA
    assert figure.layout.yaxis.ticktext[0] == "06.2 · &lt;b&gt;the sum&lt;/b&gt;"


def test_times_leave_out_what_was_not_tried_and_names_are_text(book: Gradebook) -> None:
    figure = show.grade_times(book)
    assert [list(box.y) for box in figure.data] == [[1.0, 2.0], [20.0, 20.0, 20.0]]
    assert figure.layout.yaxis.type == "log"
    assert figure.data[1].text[2] == "&lt;i&gt;s03: timeout"


def test_empty_classes_say_so(nobody: Gradebook) -> None:
    for draw in (show.grade_statuses, show.grade_totals, show.grade_criteria, show.grade_times):
        texts = [one.text for one in draw(nobody).layout.annotations]
        assert texts in (["no submissions"], ["no answer was tried"])


def test_a_class_without_a_mistake_says_so() -> None:
    book = Gradebook(students=("s01",), questions=("q",), results={("s01", "q"): result("q", "full", 10, 1.0)})
    assert [one.text for one in show.grade_criteria(book).layout.annotations] == ["no criterion was missed"]


def test_a_long_criterion_is_told_whole_on_lines(book: Gradebook) -> None:
    text = "every rank keeps `exp_avg` and `exp_avg_sq` of <its> own shard, and no other rank keeps them too."
    results = {
        key: dataclasses.replace(one, earned=(("kept", text, 0, 10),), status="wrong")
        for key, one in book.results.items()
    }
    figure = show.grade_criteria(dataclasses.replace(book, results=results))
    lines = figure.layout.yaxis.ticktext[0].split("<br>")
    assert " ".join(lines) == "06.1 · " + text.replace("`", "").rstrip(".").replace("<its>", "&lt;its&gt;")
    assert len(lines) == 3
