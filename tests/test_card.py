"""The card of a check, from values alone: what it says, in a page and in text, and what it never lets through."""

import pytest

from labkit.exercise import CaseResult, Idea, Measure
from labkit.grade.card import MAX_CHARS, Checked


def case(**fields) -> CaseResult:
    plain = {"name": "3 ranks, 5 numbers", "criterion": "a", "hidden": False, "outcome": "returned", "passed": True}
    return CaseResult(**{**plain, **fields})


def card(**fields) -> Checked:
    plain = {"question": "06.1", "title": "Ring", "status": "wrong", "score": 0, "max_score": 10, "message": "no."}
    return Checked(**{**plain, "state": "not yet", "num_cases": 4, "num_failures": 1, **fields})


FAILED = case(passed=False, message="no.", given="the input", got="what came", wanted="what should", where="line 7")
IDEA = Idea(first="the idea", further="the hint")


def test_the_page_and_the_text_say_the_same():
    waits = ((0, "waits in recv", "Cell In[3], line 7: dist.recv(x)"), (1, "has finished", ""))
    hung = case(passed=False, message="no.", outcome="timeout", waits=waits)
    shown = [
        card(cases=(case(), FAILED), idea=IDEA, seconds=1.5, notes=("a note",)),
        card(cases=(hung,), idea=IDEA, num_failures=2),
        card(state="passed", status="full", cases=(case(measures=(Measure(name="messages", value=3, budget=4),)),)),
    ]
    told = [
        [
            "not yet",
            "06.1 Ring",
            "1 of 4 cases",
            "1.5 s",
            "the input",
            "what came",
            "what should",
            "line 7",
            "the idea",
        ],
        ["waits in recv at Cell In[3], line 7: dist.recv(x)", "has finished", "rank 0", "rank 1", "the hint"],
        ["passed", "messages", "3 of at most 4"],
    ]
    for one, words in zip(shown, told, strict=True):
        for word in words:
            assert word in repr(one)
            assert word in one._repr_html_()
    assert "the hint" not in repr(shown[0]) + shown[0]._repr_html_()
    assert "a note" in repr(shown[0])


def test_no_points_in_a_notebook():
    one = card(cases=(case(), FAILED), earned=(("a", "a text", 4, 6),), score=4, max_score=17)
    assert "17" not in repr(one)
    assert "a text" not in repr(one) + one._repr_html_()


@pytest.mark.parametrize("field", ["message", "title", "question"])
def test_nothing_from_outside_is_markup(field):
    page = card(**{field: "<img src=x onerror='alert(1)'>"})._repr_html_()
    assert "<img" not in page
    assert "&lt;img" in page


def test_cases_ideas_measures_and_waits_are_no_markup_either():
    evil = "<img src=x onerror=alert(1)>"
    bad = case(
        name=evil,
        passed=False,
        message=evil,
        given=evil,
        got=evil,
        wanted=evil,
        where=evil,
        waits=((0, evil, evil),),
        measures=(Measure(name=evil, value=1, budget=2, unit=evil),),
    )
    page = card(cases=(bad,), idea=Idea(first=evil, further=evil), num_failures=2, notes=(evil,))._repr_html_()
    assert "<img" not in page


def test_long_and_odd_texts_are_cut_to_what_can_be_read():
    long = card(message="x" * 10_000_000, cases=(case(passed=False, message="x", got="[" + "1.0, " * 100_000),))
    assert len(long._repr_html_()) < 20 * MAX_CHARS
    assert "characters more)" in repr(long)
    assert "\x1b" not in repr(card(message="\x1b[31mred\x07\u202e"))


def test_numbers_beside_their_budgets():
    measures = (
        Measure(name="kept", value=1200, budget=1200, unit="B"),
        Measure(name="over", value=7, budget=4),
        Measure(name="free", value=0.25, unit="s"),
        Measure(name="nothing allowed", value=0, budget=0),
        Measure(name="odd", value=float("inf"), budget=float("nan")),
    )
    one = card(cases=(case(passed=False, message="x", measures=measures),))
    for text in ("1.2 kB of at most 1.2 kB", "7 of at most 4: over", "250 ms", "0 of at most 0"):
        assert text in repr(one)
        assert text in one._repr_html_()


def test_a_card_without_a_verdict():
    one = Checked(question="06.1", title="", status="error", score=0, max_score=0, message="stopped.", state="stopped")
    assert repr(one) == "06.1: stopped\n  stopped."
    assert not one.passed
    assert "stopped" in one._repr_html_()


def test_what_stands_between_backticks_is_code_in_a_page_and_plain_in_text():
    idea = Idea(first="`weights` are updated in place", further="none")
    one = card(message="`x < y` is wrong.", cases=(case(passed=False, message="no.", got="`raw`"),), idea=idea)
    page, text = one._repr_html_(), repr(one)
    assert "<code>x &lt; y</code> is wrong." in page
    assert "<code>weights</code> are updated" in page
    assert "`raw`" in page
    assert "x < y is wrong." in text
    assert "weights are updated" in text
