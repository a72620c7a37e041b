"""Answers that hang, crash, lie or spoil their rank: each is seen for what it did, and the next meets good ranks."""

import pytest

import labkit as lk
from labkit.cluster import Ranks
from labkit.exercise import Observation
from labkit.trial import Answer, observe
from tests.ranks import small_exercise as small

pytestmark = pytest.mark.ranks

TIMEOUT_S = 60.0
SHORT_S = 6.0
HEAD = "import os, signal, sys, threading, time\nimport torch\nimport torch.distributed as dist\n"
RIGHT = """
def total(x, group):
    n, r = dist.get_world_size(group), dist.get_rank(group)
    for _ in range(1):
        HERE
    parts = [torch.empty_like(x) for _ in range(n)]
    for step in range(1, n):
        request = dist.isend(x, group=group, group_dst=(r + step) % n)
        dist.recv(parts[step], group=group, group_src=(r - step) % n)
        request.wait()
    y = x + sum(parts[1:])
    AFTER
    return y
"""


def cell(here: str = "pass", after: str = "pass") -> str:
    """The right answer, with something done before and after its work; one line each."""
    return HEAD + RIGHT.replace("HERE", here).replace("AFTER", after)


def seen(ranks: Ranks, source: str, *, num_cases: int = 1, timeout_s: float = TIMEOUT_S) -> list[Observation]:
    cases = small.TOTAL.cases(0)[-num_cases - 1 : -1]
    answer = Answer(names=("total",), cells=(("answer, cell 1", source),))
    return list(observe(ranks, answer, cases, timeout_s=timeout_s))


def is_right(ranks: Ranks) -> bool:
    """Whether a right answer passes every visible case on these ranks."""
    cases = small.TOTAL.cases(0)[:-1]
    answer = Answer(names=("total",), cells=(("answer, cell 1", cell("print('still here')")),))
    observations = observe(ranks, answer, cases, timeout_s=TIMEOUT_S)
    return all(small.TOTAL.judge(case, one.values).passed for case, one in zip(cases, observations, strict=True))


BROKEN = {
    "sys.exit": ("sys.exit(3)", "SystemExit: 3 on rank 0 (and 3 more)."),
    "one rank exits": ("r == 2 and sys.exit(3)", "SystemExit: 3 on rank 2."),
    "recursion": ("f = lambda: f(); f()", "RecursionError: maximum recursion depth exceeded on rank 0 (and 3 more)."),
    "KeyboardInterrupt": ("raise KeyboardInterrupt('own')", "KeyboardInterrupt: own on rank 0 (and 3 more)."),
    "a BaseException": ("raise type('Odd', (BaseException,), {})('x')", "Odd: x on rank 0 (and 3 more)."),
    "no text": (
        "raise type('Odd', (Exception,), {'__str__': lambda self: sys.exit(1)})()",
        "Odd: (its text cannot be made: SystemExit) on rank 0 (and 3 more).",
    ),
    "notes that are none": (
        "raise type('Odd', (Exception,), {'__notes__': 7})('x')",
        "Odd: x on rank 0 (and 3 more).",
    ),
    "torch's NotImplementedError": (
        "torch.empty(3, device='meta').tolist()",
        "NotImplementedError: Cannot copy out of meta tensor; no data! on rank 0 (and 3 more).",
    ),
    "the world destroyed": (
        "pass; AFTER_THAT",
        "RuntimeError: the process group of all ranks was destroyed: other code needs it. Leave groups as they are "
        "on rank 0 (and 3 more).",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_an_answer_raises_is_told_with_its_line(ranks: Ranks, name: str) -> None:
    pids = ranks.pids
    here, message = BROKEN[name]
    source = cell(here) if "AFTER_THAT" not in here else cell(after="dist.destroy_process_group()")
    (one,) = seen(ranks, source)
    assert (one.outcome, one.message) == ("raised", message)
    if "AFTER_THAT" not in here:
        assert one.where == f"answer, cell 1, line 8: {here}"
    assert is_right(ranks)
    assert ranks.pids == pids


def test_an_exception_that_cannot_be_looked_at_is_told_too(ranks: Ranks) -> None:
    pids = ranks.pids
    (one,) = seen(ranks, cell("raise type('Odd', (Exception,), {'__cause__': property(lambda self: sys.exit(1))})()"))
    assert (one.outcome, one.message) == ("raised", "Odd: (it cannot be looked at: SystemExit) on rank 0 (and 3 more).")
    assert is_right(ranks)
    assert ranks.pids == pids


def test_of_ranks_that_raise_differently_the_lowest_cause_is_told(ranks: Ranks) -> None:
    here = "sum(range(10**7)) if r == 1 else None; {}['one'] if r == 1 else {}['two'] if r == 2 else None"
    (one,) = seen(ranks, cell(here))
    assert (one.outcome, one.message) == ("raised", "KeyError: 'one' on rank 1 (and 1 more).")


def test_a_closed_connection_is_a_consequence(ranks: Ranks) -> None:
    (one,) = seen(ranks, cell("r == 3 and dist.destroy_process_group(group)"))
    assert one.outcome == "raised"
    assert one.message.endswith("on rank 3.")
    assert "0x" not in one.message
    assert is_right(ranks)


POISONS = {
    "functions of torch.distributed": "dist.send = dist.recv = dist.isend = dist.new_group = dist.barrier = None",
    "methods of tensors": "torch.Tensor.tolist = torch.Tensor.__add__ = torch.Tensor.detach = lambda *a: 0",
    "settings of torch": "torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False)",
    "the process": "os.chdir('/'); os.environ.clear(); sys.path.clear(); sys.setrecursionlimit(90); sys.argv = None",
    "built-in functions": "import builtins; builtins.sum = builtins.divmod = lambda *a: 0",
    "signals": "[signal.signal(n, signal.SIG_IGN) for n in (2, 14, 15, signal.SIGRTMIN + 9)]",
    "a timer": "signal.signal(27, lambda *a: os._exit(1)); signal.setitimer(signal.ITIMER_PROF, 0.5)",
    "what messages are made with": "import json; json.JSONEncoder.encode = lambda *a: '[['",
    "a dispatch mode": (
        "from torch.utils._python_dispatch import TorchDispatchMode as M; "
        "type('Zero', (M,), {'__torch_dispatch__': lambda s, f, t, a=(), k=None: torch.zeros(1)})().__enter__()"
    ),
    "threads": "[threading.Thread(target=time.sleep, args=(5,), daemon=True).start() for _ in range(9)]",
    "closed streams": "sys.stdout.close(); sys.stderr.close()",
    "closed descriptors": "os.close(0); os.close(1); os.close(2)",
}


@pytest.mark.parametrize("name", POISONS)
def test_what_an_answer_changes_in_its_rank_is_gone_with_it(ranks: Ranks, name: str) -> None:
    pids = ranks.pids
    (one,) = seen(ranks, cell(after=POISONS[name]))
    assert one.outcome in ("returned", "raised"), one
    assert is_right(ranks)
    assert ranks.pids == pids


def test_what_an_answer_changes_in_deepspeed_is_gone_with_it(ranks: Ranks) -> None:
    model = lk.spec.Model(num_layers=1, d_model=16, num_heads=2, vocab_size=256, seq_len=8)
    plan = lk.plan.build(model, lk.spec.Layout.parse("dp4 zero1"))
    before = lk.launch.train(ranks, plan, num_steps=1, progress=False).losses
    methods = "deepspeed.DeepSpeedEngine.step = deepspeed.DeepSpeedEngine.train_batch_size"
    comm = "deepspeed.comm.all_reduce = deepspeed.comm.comm.all_reduce"
    (one,) = seen(ranks, cell(after=f"import deepspeed; deepspeed.initialize = {comm} = {methods} = None"))
    assert one.outcome == "returned", one
    assert lk.launch.train(ranks, plan, num_steps=1, progress=False).losses == before


LEFT = {
    "a send": "sys.k = dist.isend(torch.ones(3), group=group, group_dst=(r + 1) % n)",
    "a large send": "b = torch.ones(5_000_000); sys.k = dist.isend(b, group=group, group_dst=(r + 1) % n)",
    "a receive": "sys.b = torch.ones(3); sys.k = dist.irecv(sys.b, group=group, group_src=(r + 1) % n)",
    "a collective": "sys.k = dist.all_reduce(torch.ones(3), group=group, async_op=True) if r == 1 else None",
}


@pytest.mark.parametrize("name", LEFT)
def test_what_an_answer_leaves_unmatched_meets_no_other_case(ranks: Ranks, name: str) -> None:
    pids = ranks.pids
    observations = seen(ranks, cell(after=LEFT[name]), num_cases=4)
    cases = small.TOTAL.cases(0)[:-1]
    for case, one in zip(cases, observations, strict=True):
        assert one.outcome == "returned", one
        count = len(case.members)
        assert {tuple(value["result"]["values"]) for value in one.values} == {
            (float(count * (count + 1) // 2),) * case.inputs["size"]
        }
    assert is_right(ranks)
    assert ranks.pids == pids


def test_what_comes_back_is_small_and_honest(ranks: Ranks) -> None:
    odd = "type('Liar', (type,), {'__name__': property(lambda cls: 1 / 0)})"
    fake = f"{odd}('Fake', (), {{'__eq__': lambda *a: True, '__getattr__': lambda s, n: s}})()"
    for after, told in {
        f"y = {fake}": {"type": "Fake"},
        "y = torch.zeros(1).expand(10**9)": {"type": "Tensor", "shape": [10**9], "dtype": "float32"},
        "y = torch.empty(2, device='meta')": {"type": "Tensor", "shape": [2], "dtype": "float32"},
        "y = torch.zeros(2, dtype=torch.complex64)": {"type": "Tensor", "shape": [2], "dtype": "complex64"},
    }.items():
        (one,) = seen(ranks, cell(after=after))
        assert one.outcome == "returned", one
        assert [value["result"] for value in one.values] == [told] * 4


NOTEBOOKS = {
    "await": [HEAD + "import asyncio\nawait asyncio.sleep(0)", cell()],
    "future": ["from __future__ import annotations", cell().replace("(x, group)", "(x: Some, group: Thing) -> None")],
    "torch.compile": [HEAD + "@torch.compile" + RIGHT.replace("HERE", "pass").replace("AFTER", "pass")],
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_run_as_they_do_in_a_notebook(ranks: Ranks, name: str) -> None:
    answer = Answer(names=("total",), cells=tuple((f"{name}, {at}", one) for at, one in enumerate(NOTEBOOKS[name])))
    cases = small.TOTAL.cases(0)[3:4]
    (one,) = observe(ranks, answer, cases, timeout_s=TIMEOUT_S)
    assert small.TOTAL.judge(cases[0], one.values).passed, one


def test_prints_are_held_to_an_amount(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = seen(ranks, cell("r == 0 and [print('x' * 999_999) for _ in range(100)]"))
    assert one.outcome == "returned", one
    out = capsys.readouterr().out
    assert len(out) < 200_000
    assert "[rank 0]" in out
    assert is_right(ranks)


def test_a_hang_says_where_each_rank_waits_and_costs_no_process(ranks: Ranks) -> None:
    pids = ranks.pids
    source = cell("(dist.recv(x, group=group, group_src=n - 1) if r == 1 else time.sleep(600)) if r < 2 else None")
    (one,) = seen(ranks, source, timeout_s=SHORT_S)
    assert (one.outcome, one.message) == ("timeout", "ranks 0, 1, 2 and 3 did not finish within 6 s.")
    waits = {wait.rank: (wait.doing, wait.where) for wait in one.waits}
    assert waits[1][0] == "waits in recv"
    assert waits[1][1].startswith("answer, cell 1, line 8: (dist.recv(")
    assert waits[0][0] == "is"
    assert waits[2] == (
        "waits in recv",
        "answer, cell 1, line 12: dist.recv(parts[step], group=group, group_src=(r - step) % n)",
    )
    assert is_right(ranks)
    assert ranks.pids == pids


def test_members_that_are_done_are_said_to_wait_for_the_others(ranks: Ranks) -> None:
    (one,) = seen(ranks, cell(after="r == 3 and time.sleep(600)"), timeout_s=SHORT_S)
    doing = {wait.rank: wait.doing for wait in one.waits}
    assert {rank: doing[rank] for rank in range(3)} == dict.fromkeys(range(3), "has finished, and waits for the others")
    assert one.message == "rank 3 did not finish within 6 s."


def test_an_answer_that_will_not_be_freed_loses_its_process(ranks: Ranks) -> None:
    forever = "exec('while True:\\n  try: time.sleep(1)\\n  except BaseException: pass')"
    before = ranks.pids
    (one,) = seen(ranks, cell(f"r == 1 and {forever}"), timeout_s=SHORT_S)
    assert one.outcome == "timeout"
    assert is_right(ranks)
    assert {rank for rank in range(4) if ranks.pids[rank] != before[rank]} == {1}


ENDINGS = {
    "from inside": ("r == 1 and os._exit(7)", "the process of rank 1 ended from inside."),
    "by a signal": ("r == 2 and os.kill(os.getpid(), 9)", "the process of rank 2 was killed by SIGKILL."),
    "by gloo": (
        "r == 0 and dist.send(torch.ones(99), group=group, group_dst=1)",
        "the process of rank 1 was killed by SIGABRT: gloo ends a process so when a message is larger than the buffer "
        "that receives it.",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_rank_that_ends_is_named_and_restarted(ranks: Ranks, name: str) -> None:
    here, message = ENDINGS[name]
    (one,) = seen(ranks, cell(here))
    assert (one.outcome, one.message) == ("lost", message)
    assert is_right(ranks)


def test_after_two_cases_that_hung_or_crashed_the_rest_is_skipped(ranks: Ranks) -> None:
    observations = seen(ranks, cell("r == 1 and time.sleep(600)"), num_cases=4, timeout_s=1.0)
    assert [one.outcome for one in observations] == ["timeout", "timeout", "skipped", "skipped"]
    assert is_right(ranks)


def test_stubs_and_what_is_not_there(ranks: Ranks) -> None:
    (stub,) = seen(ranks, "def total(x, group):\n    raise NotImplementedError('Exercise 00.1 is not solved yet.')")
    assert (stub.outcome, stub.message) == ("unsolved", "Exercise 00.1 is not solved yet.")
    (missing,) = seen(ranks, "total = 3")
    assert (missing.outcome, missing.message) == ("missing", "total is not defined.")
    (broken,) = seen(ranks, "def total(x, group:\n    pass")
    assert (broken.outcome, broken.message[:11]) == ("raised", "SyntaxError")
