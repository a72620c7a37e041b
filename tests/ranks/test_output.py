"""What ranks print: labelled by rank, complete, and never a flood."""

import io
import re
import sys

import pytest

from labkit.cluster import Ranks
from labkit.cluster.display import MAX_MESSAGES, Display
from labkit.errors import RankError
from labkit.rank.output import MAX_BYTES_PER_CALL
from tests.ranks import work

pytestmark = pytest.mark.ranks


def lines_of(text: str, rank: int) -> list[str]:
    label = f"[rank {rank}] "
    return [line.removeprefix(label) for line in text.splitlines() if line.startswith(label)]


def test_every_line_is_labelled_by_its_rank(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(work.speaks)
    out, err = capsys.readouterr()
    for rank in range(4):
        assert lines_of(out, rank) == [f"hello {rank}", "in parts", "é ☃ 𝔘", "two", "lines"]
        assert lines_of(err, rank) == [f"to stderr {rank}"]
    assert all(line.startswith("[rank ") for line in (out + err).splitlines())


def test_a_subset_is_labelled_by_rank_not_by_place(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(work.speaks, ranks=[3])
    assert set(re.findall(r"\[rank \d\]", capsys.readouterr().out)) == {"[rank 3]"}


def test_junk_arrives_and_open_lines_are_closed(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(work.speaks_junk)
    out = capsys.readouterr().out
    for rank in range(4):
        assert lines_of(out, rank) == ["junk \\udc80 \x00 end", "no newline"]
    assert out.endswith("\n")


def test_warnings_and_logs_come_to_stderr(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(work.warns_and_logs)
    err = capsys.readouterr().err
    for rank in range(4):
        text = "\n".join(lines_of(err, rank))
        assert "UserWarning: careful" in text
        assert f"logged on {rank}" in text


def test_what_was_printed_before_an_error_is_shown(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError):
        ranks.run_cell("print('before')\n1 / 0")
    assert capsys.readouterr().out.count("before") == 4


@pytest.mark.parametrize(("num_lines", "length"), [(100_000, 999), (1, 100_000_000)], ids=["lines", "one line"])
def test_a_hundred_megabytes_are_cut_and_said(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], num_lines: int, length: int
) -> None:
    assert ranks.run(work.prints_much, num_lines, length) == ["done"] * 4
    out = capsys.readouterr().out
    assert len(out) < 4 * (MAX_BYTES_PER_CALL + 2000)
    for rank in range(4):
        assert lines_of(out, rank)[-1] == "[99.9 MB more not shown: at most 64 KiB a call are]"
    ranks.run(work.speaks)  # the next call has the whole allowance again
    assert len(lines_of(capsys.readouterr().out, 0)) == 5


def test_a_progress_bar_does_not_flood(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(work.draws_a_bar, 2_000)
    err = capsys.readouterr().err
    assert len(err) < 10_000
    for rank in range(4):
        assert f"[rank {rank}] 2000/2000 steps\n" in err
    assert "not shown" not in err


def test_values_of_a_cell_are_shown_by_rank(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run_cell("import torch.distributed as dist\n10 + dist.get_rank()")
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {rank}] {10 + rank}" for rank in range(4)]
    ranks.run_cell("'a' * 1_000_000", ranks=[1])
    out = capsys.readouterr().out
    assert len(out) < 100_000
    assert "characters more" in out


def test_top_level_await_works(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run_cell("import asyncio\nawait asyncio.sleep(0.01)\nprint('awaited')")
    assert capsys.readouterr().out.count("awaited") == 4


# -- the display alone -----------------------------------------------------------------------------------------------


def stream(text: str, name: str = "stdout") -> dict[str, object]:
    return {"header": {"msg_type": "stream"}, "content": {"name": name, "text": text}}


def shown(messages: list[tuple[int, dict[str, object]]], capsys: pytest.CaptureFixture[str]) -> str:
    display = Display()
    for rank, message in messages:
        display.take(rank, message)
        display.show()
    display.finish()
    return capsys.readouterr().out


def test_a_line_in_parts_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown([(0, stream("a")), (0, stream("b")), (0, stream("c\nd"))], capsys) == "[rank 0] abc\n[rank 0] d\n"


def test_open_lines_of_several_ranks_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    messages = [(0, stream("a")), (1, stream("x")), (0, stream("b")), (1, stream("y")), (0, stream("c\n"))]
    assert shown(messages, capsys) == "[rank 0] abc\n[rank 1] xy\n"


def test_a_complete_line_closes_the_open_one_of_another_rank(capsys: pytest.CaptureFixture[str]) -> None:
    messages = [(0, stream("50%")), (1, stream("done\n")), (0, stream("\n"))]
    assert shown(messages, capsys) == "[rank 0] 50%\n[rank 1] done\n"


def test_a_redrawn_line_is_drawn_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    messages = [(0, stream("\r1%")), (0, stream("\r2%\r3%")), (1, stream("\r9%")), (0, stream("\r4%\n"))]
    assert shown(messages, capsys) == "[rank 0] 1%\r[rank 0] 3%\r[rank 0] 4%\n[rank 1] 9%\n"


def test_windows_line_ends_are_line_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown([(0, stream("a\r\nb\r\n"))], capsys) == "[rank 0] a\n[rank 0] b\n"


def test_more_messages_than_fit_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    for _ in range(MAX_MESSAGES + 7):
        display.take(0, stream("x\n"))
    display.finish()
    out = capsys.readouterr().out
    assert out.count("[rank 0] x\n") == MAX_MESSAGES
    assert out.endswith(f"[7 more outputs not shown: at most {MAX_MESSAGES} at once are]\n")


def test_a_notebook_that_cannot_encode_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    display = Display()
    display.take(0, stream("é\n"))
    display.finish()
    assert raw.getvalue() == b"[rank 0] \\xe9\n"
