"""`ranks.run`: order, values, errors, lost ranks, timeouts, calls in the background."""

import operator
import signal
import threading

import numpy as np
import pytest
import torch

import labkit as lk
from labkit.cluster import Ranks
from labkit.errors import PlanError, RankError, RankLost
from tests.ranks import work

pytestmark = pytest.mark.ranks

TIMEOUT_S = 60.0


class Scale:
    """A callable with state, defined where tests are."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def __call__(self, value: int) -> int:
        return self.factor * value

    def shifted(self, value: int, *, by: int = 0) -> int:
        """A method with a keyword."""
        return self.factor * value + by


def failure_of(caught: pytest.ExceptionInfo[RankError], rank: int) -> lk.errors.Failure:
    return caught.value.failures[rank]


# -- values ----------------------------------------------------------------------------------------------------------


def test_results_come_in_rank_order_and_in_the_order_of_a_subset(ranks: Ranks) -> None:
    assert ranks.run(work.rank_number) == [0, 1, 2, 3]
    assert ranks.run(work.rank_number, ranks=[3, 1]) == [3, 1]
    assert ranks.run(work.rank_number, ranks=(rank for rank in (2, 0, 3))) == [2, 0, 3]
    assert ranks.run(work.rank_number, ranks=np.array([1])) == [1]


def test_every_kind_of_function(ranks: Ranks) -> None:
    offset = 10

    def inner(value: int) -> int:
        return value + offset

    def closure(value: int) -> int:
        return inner(value) * 2

    first = [0]
    assert ranks.run(lambda x, *, y: x + y, 1, y=2, ranks=first) == [3]
    assert ranks.run(closure, 1, ranks=first) == [22]
    assert ranks.run(Scale(3), 5, ranks=first) == [15]
    assert ranks.run(Scale(3).shifted, 5, by=1, ranks=first) == [16]
    assert [type(one).__name__ for one in ranks.run(Scale, 4, ranks=first)] == ["Scale"]
    assert ranks.run(operator.add, 1, 2, ranks=first) == [3]
    assert ranks.run("tests.ranks.work:sum_of_ranks") == [6.0] * 4
    assert ranks.run(work.arguments, 1, [2], ranks=first, name="x") == [((1, [2]), {"name": "x"})]


def test_tensors_arrays_and_large_values(ranks: Ranks) -> None:
    tensors = ranks.run(lambda: torch.full((2, 3), float(torch.distributed.get_rank())))
    assert [one.tolist() for one in tensors] == [[[float(rank)] * 3] * 2 for rank in range(4)]
    (array,) = ranks.run(work.large, work.LARGE_BYTES, ranks=[2])
    assert array.nbytes == work.LARGE_BYTES
    assert set(array[:: 1 << 20]) == {2}
    assert ranks.run(len, bytes(work.LARGE_BYTES), ranks=[1]) == [work.LARGE_BYTES]


def test_cells_define_names_that_functions_of_the_notebook_see(ranks: Ranks) -> None:
    ranks.run_cell("from torch.distributed import get_rank\nfrom_the_cell = 10 * get_rank()")
    namespace = {"__name__": "__main__"}
    exec("def f():\n    return helper() + 1\n\ndef helper():\n    return from_the_cell", namespace)
    assert ranks.run(namespace["f"]) == [1, 11, 21, 31]  # type: ignore[arg-type]


# -- what cannot travel ----------------------------------------------------------------------------------------------


def test_arguments_that_cannot_travel_are_named(ranks: Ranks) -> None:
    lock = threading.Lock()
    with pytest.raises(PlanError, match="argument 1 of type lock cannot be sent to the ranks"):
        ranks.run(work.arguments, lock)
    with pytest.raises(PlanError, match="argument handle= of type lock"):
        ranks.run(work.arguments, handle=lock)
    with pytest.raises(PlanError, match="or a variable that it uses"):
        ranks.run(lambda: lock.locked())


def test_results_that_cannot_travel_are_named(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="the result of type lock cannot be sent to the notebook") as caught:
        ranks.run(work.returns_a_lock)
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert failure_of(caught, 1).type == "TypeError"
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4


@pytest.mark.parametrize(
    ("fn", "kind"), [(work.returns_what_leaves, "SystemExit"), (work.returns_what_fails, "ValueError")]
)
def test_results_that_cannot_be_opened_here_are_errors(ranks: Ranks, fn, kind: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RankError, match="its result cannot be unpickled in the notebook") as caught:
        ranks.run(fn)
    assert failure_of(caught, 0).type == kind


# -- errors ----------------------------------------------------------------------------------------------------------


def test_one_rank_raises_and_the_others_are_freed(ranks: Ranks) -> None:
    pids, token = ranks.pids, ranks.token
    with pytest.raises(RankError) as caught:
        ranks.run(work.fails_on, 2, timeout_s=TIMEOUT_S)
    assert list(caught.value.failures) == [2]
    assert caught.value.freed == (0, 1, 3)
    failure = failure_of(caught, 2)
    assert (failure.type, failure.message) == ("ValueError", "boom on 2")
    assert failure.where.partition(":")[0].endswith("work.py")
    assert 'raise ValueError(f"boom on {rank}")' in failure.traceback
    assert str(caught.value).startswith("[rank 2] ValueError: boom on 2 at ")
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4
    assert ranks.pids == pids
    assert ranks.token > token


def test_all_ranks_raise_at_the_same_line_and_groups_are_kept(ranks: Ranks) -> None:
    ranks.run(work.makes_a_group)
    token = ranks.token
    with pytest.raises(RankError) as caught:
        ranks.run(work.fails_everywhere)
    assert str(caught.value).startswith("[ranks 0, 1, 2 and 3] ValueError: everywhere at ")
    assert str(caught.value).count("ValueError: everywhere") == 1
    assert caught.value.freed == ()
    assert ranks.run(work.uses_the_group) == [4.0] * 4
    with pytest.raises(RankError):
        ranks.run_cell("def f():\n    return 1 / 0\nf()")
    assert ranks.run(work.uses_the_group) == [4.0] * 4
    assert ranks.token == token


def test_all_ranks_raise_differently_and_groups_are_new(ranks: Ranks) -> None:
    token = ranks.token
    with pytest.raises(RankError) as caught:
        ranks.run(work.fails_differently)
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4
    assert ranks.token == token + 1


@pytest.mark.parametrize(
    ("fn", "args", "kind", "text"),
    [
        (work.raises_mute, (), "Mute", "its text cannot be made: RuntimeError"),
        (work.raises_unusual, (), "Unusual", "not an Exception"),
        (work.raises_huge, (), "ValueError", "characters left out"),
        (work.raises_with_cause, (), "ValueError", "caused by KeyError: 'missing'"),
        (work.recurses, (), "RecursionError", "maximum recursion depth"),
        (work.leaves, (2,), "SystemExit", "2"),
        (work.leaves, (None,), "SystemExit", "sys.exit(code)"),
        (work.calls_exit, (), "SystemExit", "exit()"),
        (work.interrupts_itself, (), "KeyboardInterrupt", "raise KeyboardInterrupt"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_whatever_is_raised_is_told_and_ends_no_rank(ranks: Ranks, fn, args, kind: str, text: str) -> None:  # type: ignore[no-untyped-def]
    pids = ranks.pids
    with pytest.raises(RankError) as caught:
        ranks.run(fn, *args)
    assert {one.type for one in caught.value.failures.values()} == {kind}
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert text in str(caught.value)
    assert len(str(caught.value)) < 20_000
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4
    assert ranks.pids == pids


def test_the_line_of_the_caller_is_named_where_a_library_raised(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(lambda: torch.nn.Linear(2, 2)(torch.ones(3)), ranks=[1])
    assert failure_of(caught, 1).where.partition(":")[0].endswith("test_run.py")


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("a b", "SyntaxError", "a b"),
        ("def f():\n    return 1 / 0\nf()", "ZeroDivisionError", "return 1 / 0"),
        ("import sys; sys.exit(3)", "SystemExit", "3"),
        ("exit()", "SystemExit", "exit() ends no rank"),
        ("quit", "SystemExit", "exit() ends no rank"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "raise KeyboardInterrupt"),
        ("import asyncio\nawait asyncio.sleep(0.01)\n1 / 0", "ZeroDivisionError", "division by zero"),
    ],
)
def test_cells_that_fail_end_no_rank(ranks: Ranks, code: str, kind: str, text: str) -> None:
    pids = ranks.pids
    with pytest.raises(RankError, match=r"^\[ranks 0, 1, 2 and 3\]") as caught:
        ranks.run_cell(code)
    assert failure_of(caught, 0).type == kind
    assert text in str(caught.value)
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4
    assert ranks.pids == pids


@pytest.mark.parametrize("fn", [5, None, "os", "os:", ":f", "os.path.join", b"os:getpid"])
def test_what_is_no_function_is_refused_here(ranks: Ranks, fn: object) -> None:
    with pytest.raises(PlanError, match=r"give (ranks.run )?the function itself"):
        ranks.run(fn)  # type: ignore[arg-type]


@pytest.mark.parametrize("fn", ["no_such_module:f", "os:no_such_function", "os:environ"])
def test_a_dotted_name_that_leads_nowhere_is_an_error_of_the_ranks(ranks: Ranks, fn: str) -> None:
    with pytest.raises(RankError, match=f"PlanError: '{fn}'"):
        ranks.run(fn)


@pytest.mark.parametrize(
    "arguments",
    [{"ranks": 1}, {"ranks": [True]}, {"ranks": [9]}, {"ranks": []}, {"timeout_s": 0}, {"timeout_s": None}],
    ids=str,
)
def test_bad_arguments_are_refused_and_name_themselves(ranks: Ranks, arguments: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(arguments)).rstrip('s')}"):
        ranks.run(work.rank_number, **arguments)  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        ranks.run_cell("1", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", ["1", 9, -1, True, None, 1.0])
@pytest.mark.parametrize("method", ["kill", "pause", "resume", "restart"])
def test_a_rank_that_does_not_exist_is_refused(ranks: Ranks, method: str, rank: object) -> None:
    with pytest.raises(PlanError, match="rank="):
        getattr(ranks, method)(rank)


def test_a_cell_is_a_text(ranks: Ranks) -> None:
    with pytest.raises(PlanError, match="5 is of type int: the text of a cell is needed"):
        ranks.run_cell(5)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="timeout_s='x'"):
        ranks.interrupt(timeout_s="x")  # type: ignore[arg-type]


# -- lost ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "args", "signal_name", "text"),
    [
        (work.exits_at_once, (2, 3), "", "exit code 3"),
        (work.kills_itself, (2, int(signal.SIGSEGV)), "SIGSEGV", "was killed by SIGSEGV"),
        (work.kills_itself, (2, int(signal.SIGKILL)), "SIGKILL", "was killed by SIGKILL"),
    ],
    ids=["exit", "segfault", "kill"],
)
def test_a_rank_that_dies_is_named(ranks: Ranks, fn, args, signal_name: str, text: str) -> None:  # type: ignore[no-untyped-def]
    others = {rank: pid for rank, pid in ranks.pids.items() if rank != 2}
    with pytest.raises(RankLost) as caught:
        ranks.run(fn, *args, timeout_s=TIMEOUT_S)
    error = caught.value
    assert (error.rank, error.signal, error.lost) == (2, signal_name, (2,))
    assert str(error).startswith("[rank 2] process")
    assert text in str(error)
    assert "ranks.restart(2)" in str(error)
    with pytest.raises(RankLost, match="rank 2 is gone"):
        ranks.run(work.rank_number)
    assert ranks.run(lambda: 5, ranks=[0, 3]) == [5, 5]
    ranks.restart(2)
    assert ranks.run(work.sum_of_ranks) == [6.0] * 4
    assert {rank: pid for rank, pid in ranks.pids.items() if rank != 2} == others
