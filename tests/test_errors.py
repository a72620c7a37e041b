"""Errors carry ranks and numbers, and read well in a notebook."""

import pickle
import traceback

import pytest

from labkit.errors import (
    MAX_MESSAGE_CHARS,
    ClusterError,
    Failure,
    LabError,
    PlanError,
    RankError,
    RankLost,
    RankTimeout,
    ranks_text,
    text_of,
)


def failure(message: str, **fields: str) -> Failure:
    return Failure(type="ValueError", message=message, **fields)  # type: ignore[arg-type]


def test_equal_causes_are_folded() -> None:
    error = RankError(
        {rank: failure("boom", where="a.py:3", traceback='  File "a.py", line 3, in f\n') for rank in range(4)}
    )
    assert str(error) == '[ranks 0, 1, 2 and 3] ValueError: boom at a.py:3\n  File "a.py", line 3, in f'


def test_different_causes_stand_apart_and_at_most_four_are_shown() -> None:
    error = RankError({rank: failure(f"number {rank}") for rank in range(6)})
    lines = str(error).splitlines()
    assert lines[:4] == [f"[rank {rank}] ValueError: number {rank}" for rank in range(4)]
    assert lines[4:] == ["... and 2 other errors on ranks 4 and 5: see .failures."]
    assert sorted(error.failures) == list(range(6))


def test_freed_ranks_are_named() -> None:
    error = RankError({2: failure("boom")}, freed=[0, 1, 3], action="step")
    assert error.freed == (0, 1, 3)
    assert error.action == "step"
    assert str(error).endswith("ranks 0, 1 and 3 waited for the failed ranks and were freed.")


def test_huge_messages_and_tracebacks_are_cut_in_the_middle() -> None:
    one = failure("a" * 10_000_000 + "the end", traceback="t" * 10_000_000)
    assert len(one.message) < MAX_MESSAGE_CHARS + 100
    assert one.message.endswith("the end")
    assert "characters left out" in one.message
    assert len(str(RankError(dict.fromkeys(range(4), one)))) < 20_000
    assert failure("short").message == "short"


def test_an_exception_without_a_text_has_one() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert text_of(Mute()) == "(its text cannot be made: RuntimeError)"
    assert text_of(ValueError("plain")) == "plain"


def test_names_of_ranks() -> None:
    assert [ranks_text(ranks) for ranks in ([], [2], [0, 1], [0, 1, 3])] == [
        "no rank",
        "rank 2",
        "ranks 0 and 1",
        "ranks 0, 1 and 3",
    ]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PlanError("x"), ValueError),
        (ClusterError("x"), RuntimeError),
        (RankError({0: failure("x")}), RuntimeError),
        (RankLost("x", rank=1), RuntimeError),
        (RankTimeout("x", missing=[1]), TimeoutError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_is_a_lab_error_and_a_usual_one(error: LabError, kind: type[Exception]) -> None:
    assert isinstance(error, LabError)
    assert isinstance(error, kind)


@pytest.mark.parametrize(
    "error",
    [
        RankError({1: failure("x")}, freed=[0], action="f"),
        RankLost("gone", rank=1, signal="SIGKILL", step=3, lost=[1, 2]),
        RankTimeout("late", missing=[1, 2], action="f", step=4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_with_fields_can_be_pickled(error: LabError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_notebook_shows_its_own_lines_and_the_message_only() -> None:
    def the_line_of_the_notebook() -> None:
        raise RankLost("[rank 1] process was killed by SIGKILL during f.", rank=1, signal="SIGKILL")

    with pytest.raises(RankLost) as caught:
        the_line_of_the_notebook()
    lines = caught.value._render_traceback_()
    assert lines[-1] == "RankLost: [rank 1] process was killed by SIGKILL during f."
    assert any("the_line_of_the_notebook()" in line for line in lines)
    assert len(lines) <= 4


def test_frames_of_the_lab_are_left_out_of_what_a_notebook_shows() -> None:
    from labkit.cluster.checks import check_timeout

    with pytest.raises(PlanError) as caught:
        check_timeout("x")
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 2
    assert not any("checks.py" in line for line in caught.value._render_traceback_())
