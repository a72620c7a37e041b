"""`labkit.grade.check` on live ranks: the verdict, what is told, and ranks that are good for the next check."""

import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import labkit as lk
from labkit import checks
from labkit.cluster import Ranks
from labkit.grade import checking, own_ranks
from tests.ranks import small_exercise as small
from tests.ranks.kernel import Kernel

pytestmark = pytest.mark.ranks

LIMIT_S = 60.0
NEW_GROUPS = "the ranks have new process groups: a group or mesh of your own is to be made once more."


@pytest.fixture(autouse=True)
def small_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry holds the small exercises, and nobody has failed yet."""
    monkeypatch.setattr(checks, "QUESTIONS", small.QUESTIONS)
    monkeypatch.setattr(checking, "_failures", Counter())


def total(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Right."""
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


def three_at_most(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Wrong from three members on."""
    return total(x, group) if dist.get_world_size(group) < 3 else x


def raises_on_one(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if dist.get_rank(group) == 1:
        raise ValueError("<script>alert(1)</script>")
    return total(x, group)


def hangs(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if dist.get_rank(group) == 0:
        dist.recv(x, group=group, group_src=1)
    return total(x, group)


def kills(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if dist.get_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return total(x, group)


def stub(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    raise NotImplementedError("not solved yet")


def raises(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    raise ValueError("everywhere")


def prints(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    print("here is", x.numel())
    return total(x, group)


def ping() -> str:
    return "ping"


def pong() -> str:
    return "pong"


def alone() -> str:
    return "alone"


def times_out(seconds: float) -> None:
    time.sleep(seconds)


# -- verdicts --------------------------------------------------------------------------------------------------------


def test_a_right_answer_passes_every_visible_case(ranks: Ranks) -> None:
    result = lk.grade.check("00.1", total, ranks=ranks)
    assert (result.passed, result.state, result.status, result.message) == (True, "passed", "full", "4 cases passed.")
    assert [one.name for one in result.cases] == [case.name for case in small.TOTAL.cases(0) if not case.hidden]
    page, text = result._repr_html_(), repr(result)
    for told in ("passed", "00.1 total", "4 of 4 cases", "operations", "1 of at most 8", "5 kB"):
        assert told in page
        assert told in text
    assert "10" not in text.replace("100", "")  # no points in a notebook


def test_a_wrong_answer_shows_the_smallest_case_that_fails_and_more_at_the_second_time(ranks: Ranks) -> None:
    first = lk.grade.check("00.1", three_at_most, ranks=ranks)
    assert (first.state, first.status, first.passed) == ("not yet", "wrong", False)
    assert [one.passed for one in first.cases] == [True, True, False]
    assert first.message == "rank 0 of 3 has [1.0, 1.0, 1.0], and the sum is 6."
    for told in (
        "2 of 4 cases",
        "[1.0, 1.0, 1.0]",
        "[6.0, 6.0, 6.0]",
        "rank r brings 3 times r + 1",
        "Everybody needs",
    ):
        assert told in first._repr_html_()
        assert told in repr(first)
    assert "Start with two ranks." not in repr(first)
    second = lk.grade.check("00.1", three_at_most, ranks=ranks)
    assert "Start with two ranks." in repr(second)
    assert "Start with two ranks." in second._repr_html_()


def test_what_one_rank_raises_is_told_and_nothing_in_it_is_markup(ranks: Ranks) -> None:
    pids = ranks.pids
    result = lk.grade.check("00.1", raises_on_one, ranks=ranks)
    assert (result.state, result.status) == ("error", "error")
    assert result.message == "ValueError: <script>alert(1)</script> on rank 1."
    assert result.first_failure.where.startswith("test_check.py, line ")
    assert 'raise ValueError("<script>' in result.first_failure.where
    assert "<script>" not in result._repr_html_()
    assert lk.grade.check("00.1", total, ranks=ranks).passed
    assert ranks.pids == pids


def test_a_hang_is_cut_off_and_says_where_every_rank_waits(ranks: Ranks) -> None:
    pids = ranks.pids
    # Long enough for every rank to get to where it waits, on any machine.
    result = lk.grade.check("00.1", hangs, ranks=ranks, timeout_s=10.0)
    assert (result.state, result.status) == ("not yet", "timeout")
    assert result.message == "ranks 0 and 1 did not finish within 10 s."
    text = repr(result)
    assert "waits in recv at test_check.py, line " in text
    assert "waits in all_reduce at test_check.py, line " in text
    assert "A receive needs its send." in text
    assert NEW_GROUPS in result.notes
    assert lk.grade.check("00.1", total, ranks=ranks).passed
    assert ranks.pids == pids


def test_a_killed_rank_is_named_and_restarted(ranks: Ranks) -> None:
    result = lk.grade.check("00.1", kills, ranks=ranks)
    assert (result.state, result.status) == ("error", "crashed")
    assert result.message == "the process of rank 1 was killed by SIGKILL."
    assert any("new process" in note for note in result.notes)
    assert lk.grade.check("00.1", total, ranks=ranks).passed


@pytest.mark.parametrize(("answer", "status"), [(stub, "unsolved"), (raises, "error")])
def test_an_answer_that_ends_alike_everywhere_says_nothing_of_groups(
    ranks: Ranks, answer: Callable[..., Any], status: str
) -> None:
    result = lk.grade.check("00.1", answer, ranks=ranks)
    assert (result.status, result.notes) == (status, ())


def test_what_the_answer_prints_is_shown(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    assert lk.grade.check("00.1", prints, ranks=ranks).passed
    assert "[rank 3] here is 4" in capsys.readouterr().out


def test_the_stop_button_frees_the_ranks(ranks: Ranks) -> None:
    pids = ranks.pids

    def press() -> None:
        deadline = time.monotonic() + LIMIT_S
        while not ranks.under_way() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    result = lk.grade.check("00.1", hangs, ranks=ranks, timeout_s=LIMIT_S)
    thread.join()
    assert (result.state, result.passed) == ("stopped", False)
    assert lk.grade.check("00.1", total, ranks=ranks).passed
    assert ranks.pids == pids


# -- which functions -------------------------------------------------------------------------------------------------


def no_wraps(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compile` does (which takes seconds to load): it cannot be sent, and knows the function in it."""
    lock = threading.Lock()

    def call(*args: Any) -> Any:
        with lock:
            return function(*args)

    call._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    return call


class Total:
    """An object that can be called."""

    def __call__(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return total(x, group)


ANSWERS = {
    "lambda": lambda x, group: total(x, group),
    "partial": functools.partial(total),
    "object": Total(),
    "decorated": no_wraps(total),
    "compiled": compiled(total),
    "wrapped": functools.wraps(total)(no_wraps(total)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_kind_of_function(ranks: Ranks, name: str) -> None:
    result = lk.grade.check("00.1", ANSWERS[name], ranks=ranks)
    assert result.passed, result


def test_several_functions_in_any_order_and_looked_up_beside(ranks: Ranks) -> None:
    assert lk.grade.check("00.2", pong, ping, ranks=ranks).passed
    assert lk.grade.check("00.2", pong, ranks=ranks).passed


def test_a_function_that_is_nowhere_is_named() -> None:
    space: dict[str, Any] = {}
    exec("def ping(): return 'ping'", space)
    result = lk.grade.check("00.2", space["ping"])
    assert (result.state, result.status) == ("not yet", "missing")
    assert result.message == "pong is not defined: run the cell of it."
    assert lk.grade.check("00.2").message == "ping and pong are not defined: run their cells."


class Unreadable:
    def __repr__(self) -> str:
        raise SystemExit

    def __getattr__(self, name: str) -> Any:
        raise SystemExit


MISUSE: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no such question": (("9.9", total), {}, "there is no question '9.9': the questions are 00.1, 00.2, 00.3."),
    "a number": ((6.1, total), {}, "question 6.1 is of type float: its number is a text, one of 00.1, 00.2, 00.3."),
    "a list": (([], total), {}, "question [] is of type list"),
    "a result": (("00.1", torch.ones(1)), {}, "is of type Tensor, not a function: hand in the function itself"),
    "a text": (("00.1", "total"), {}, "answer 1, 'total', is of type str, not a function"),
    "too many": (("00.1", total, ping), {}, "2 answers for 00.1, which asks for 1 function: total."),
    "twice": (("00.2", ping, ping), {}, "ping was handed in twice"),
    "a stranger": (("00.2", ping, alone), {}, "is none of ping and pong: 00.2 knows its functions by name."),
    "no ranks": (("00.1", total), {"ranks": [0, 1]}, "ranks=[0, 1] is of type list"),
    "no time": (("00.1", total), {"timeout_s": 0}, "timeout_s=0 is not above 0"),
    "unreadable": (("00.1", Unreadable()), {}, "the check itself failed (SystemExit)"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_told_on_the_card(name: str) -> None:
    args, kwargs, told = MISUSE[name]
    result = lk.grade.check(*args, **kwargs)
    assert (result.passed, result.state, result.status) == (False, "error", "error")
    assert told in result.message
    assert "error" in result._repr_html_()


# -- which ranks -----------------------------------------------------------------------------------------------------


def test_busy_ranks_are_left_to_what_runs_on_them(ranks: Ranks) -> None:
    call = ranks.run(times_out, 5.0, block=False)
    result = lk.grade.check("00.1", total, ranks=ranks)
    assert result.state == "error"
    assert "times_out is still going on these ranks" in result.message
    assert not call.done
    assert call.result(LIMIT_S) == [None] * 4


def test_a_call_that_nobody_waits_for_any_more_is_ended(ranks: Ranks) -> None:
    for _ in range(2):
        with pytest.raises(lk.errors.RankTimeout):
            ranks.run(times_out, 600.0, timeout_s=0.2)
    result = lk.grade.check("00.1", total, ranks=ranks)
    assert result.passed, result
    assert any(note.startswith("times_out was still going on although nobody waited") for note in result.notes)
    assert lk.grade.check("00.1", total, ranks=ranks).notes == ()


def test_a_call_that_somebody_waits_for_keeps_one_left_over_from_being_ended(ranks: Ranks) -> None:
    with pytest.raises(lk.errors.RankTimeout):
        ranks.run(times_out, 600.0, timeout_s=0.2)
    held = ranks.run(times_out, 0.0, block=False)
    assert "times_out is still going on these ranks" in lk.grade.check("00.1", total, ranks=ranks).message
    assert not held.done
    ranks.interrupt()


def test_its_own_ranks_are_put_right(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_ranks, "_own", ranks)
    ranks.pause(1)
    ranks.kill(2)
    call = ranks.run(times_out, 600.0, ranks=[0], block=False)
    assert lk.grade.check("00.1", total).passed
    assert call.done
    assert own_ranks.ready() is ranks


def test_ranks_go_by_name(ranks: Ranks) -> None:
    assert "they go by name" in lk.grade.check("00.2", ping, ranks).message


def test_a_function_that_cannot_be_sent(ranks: Ranks) -> None:
    lock = threading.Lock()
    result = lk.grade.check("00.1", lambda x, group: lock, ranks=ranks)
    assert (result.state, "cannot be sent to the ranks" in result.message) == ("error", True)


def test_fewer_ranks_than_a_case_has_members_and_ranks_that_cannot_be_used() -> None:
    with lk.cluster.start(2) as two:
        result = lk.grade.check("00.1", total, ranks=two)
        assert (result.passed, result.num_cases) == (True, 1)
        none = lk.grade.check("00.3", total, ranks=two)
        assert none.message.startswith("2 ranks are up, and the smallest case of 00.3 needs 3:")
        two.pause(1)
        assert "Use ranks.resume(1)." in lk.grade.check("00.1", total, ranks=two).message
        two.resume(1)
        two.kill(0)
        assert "Use ranks.restart(0)." in lk.grade.check("00.1", total, ranks=two).message
    assert "Start new ones" in lk.grade.check("00.1", total, ranks=two).message


# -- in a notebook ---------------------------------------------------------------------------------------------------

SETUP = """
import os
import labkit as lk
from labkit import checks
from labkit.grade import own_ranks
import torch, torch.distributed as dist
checks.QUESTIONS = {"00.1": "tests.ranks.small_exercise:TOTAL"}
"""
ANSWER = """
def total(x, group):
    if BAD and dist.get_rank(group) == 0:
        dist.recv(x, group=group, group_src=1)
    dist.all_reduce(x, group=group)
    return x
"""


@pytest.fixture
def kernel(repository: Any) -> Iterator[Kernel]:
    started = Kernel(str(repository))
    try:
        started.run(SETUP)
        yield started
    finally:
        started.stop()


@pytest.mark.slow
def test_its_own_ranks_in_a_notebook(kernel: Kernel) -> None:
    kernel.run("BAD = False" + ANSWER)
    kernel.run("ranks = lk.cluster.start(2)")
    shown = kernel.run("result = lk.grade.check('00.1'); print(result.state, own_ranks.ready().pids); result")
    state, pids = shown.out.split(" ", 1)
    assert state == "passed", shown
    assert "4 of 4 cases" in shown.data[-1]["text/html"]
    # They are kept, and %%px stays with the learner's ranks.
    assert kernel.run("print(own_ranks.ready().pids)").out == pids
    assert kernel.run("%%px\nprint('mine')").out.split("\n")[:2] == ["[rank 0] mine", "[rank 1] mine"]
    # The stop button.
    kernel.run("BAD = True")
    stopped = kernel.run("print('go'); lk.grade.check('00.1', total, timeout_s=60)", interrupt_after="go")
    assert "stopped" in stopped.data[-1]["text/plain"], stopped
    hung = kernel.run("lk.grade.check('00.1', total, timeout_s=2)").data[-1]["text/plain"]
    assert "waits in recv at Cell In[" in hung
    assert "line 4: dist.recv(x, group=group, group_src=1)" in hung
    kernel.run("BAD = False")
    assert kernel.run("print(own_ranks.ready().pids)").out == pids
    kernel.run("own_ranks.ready().stop()")
    assert kernel.run("print(lk.grade.check('00.1', total).state)").out == "passed\n"
