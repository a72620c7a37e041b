"""`%%px` and its kin in a real Jupyter kernel and in a real IPython shell."""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.ranks.kernel import Kernel, Shown

pytestmark = pytest.mark.ranks

TIMEOUT_S = 120.0
SUM = "%%px\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Processes here are the kernel's, which restarts ranks; the fixture `kernel` checks that they end with it."""


@pytest.fixture(scope="module")
def kernel(repository: pathlib.Path) -> Iterator[Kernel]:
    """A kernel in which `ranks` are four ranks that know `torch` and `dist`."""
    started = Kernel(str(repository))
    ours: set[psutil.Process] = set()
    try:
        begun = started.run("import time\nimport labkit as lk\nranks = lk.cluster.start(4)")
        assert not begun.error, begun
        assert not started.run("%%px\nimport os, time, torch\nimport torch.distributed as dist").error
        yield started
        ours = started.processes()
    finally:
        started.stop()
    _, left = psutil.wait_procs(ours, timeout=TIMEOUT_S)
    assert not left, f"processes outlive the kernel: {left}"


def by_rank(shown: Shown) -> dict[int, str]:
    """What each rank wrote on stdout."""
    found: dict[int, str] = {}
    for rank, text in re.findall(r"^\[rank (\d)\] (.*)$", shown.out, re.MULTILINE):
        found[int(rank)] = found[int(rank)] + "\n" + text if int(rank) in found else text
    return found


def everywhere(text: str) -> dict[int, str]:
    return dict.fromkeys(range(4), text)


def assert_works(kernel: Kernel) -> None:
    assert by_rank(kernel.run(SUM)) == everywhere("4.0")


def test_output_and_last_values_are_labelled_by_rank(kernel: Kernel) -> None:
    shown = kernel.run("%%px\nprint('hello')\nmine = 10 * dist.get_rank()\nmine + 1")
    assert by_rank(shown) == {rank: f"hello\n{10 * rank + 1}" for rank in range(4)}
    assert not shown.error
    assert not shown.err


def test_lines_and_names_that_functions_of_the_notebook_see(kernel: Kernel) -> None:
    kernel.run("%px there = 5")
    assert by_rank(kernel.run("%px there + 1")) == everywhere("6")
    shown = kernel.run("def f():\n    return g() + there\n\ndef g():\n    return there\n\nprint(ranks.run(f))")
    assert shown.out == "[10, 10, 10, 10]\n", shown


def test_rich_output_is_labelled_and_kept(kernel: Kernel) -> None:
    shown = kernel.run("%%px --targets 0,3\nfrom IPython.display import HTML\nHTML(f'<b>{dist.get_rank()}</b>')")
    assert [one["text/html"] for one in shown.data] == ["<b>0</b>", "<b>3</b>"]
    assert shown.out == "[rank 0]\n[rank 3]\n"


@pytest.mark.parametrize(
    ("targets", "ranks"),
    [("0,2", [0, 2]), ("1:3", [1, 2]), ("3", [3]), ("[1,0]", [1, 0]), ("::2", [0, 2]), ("all", [0, 1, 2, 3])],
)
def test_targets(kernel: Kernel, targets: str, ranks: list[int]) -> None:
    for option in ("--targets", "--ranks"):
        shown = kernel.run(f"%%px {option} {targets}\ndist.get_rank()")
        assert by_rank(shown) == {rank: str(rank) for rank in ranks}


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        ("9", "rank=9 is outside 0 to 3. Use rank=3."),
        ("x", "--targets x: ranks are named like 0,2 or 1:3 or all."),
        ("True", "--targets True: ranks are named like"),
        ("1:2:0", "--targets 1:2:0: ranks are named like"),
        ("0,0", "names 1 ranks in 2 places"),
        ("3:1", "names no rank"),
    ],
)
def test_bad_targets_are_refused(kernel: Kernel, targets: str, text: str) -> None:
    shown = kernel.run(f"%%px --targets {targets}\n1")
    assert shown.error == "PlanError"
    assert text in shown.message


def test_cells_in_the_background(kernel: Kernel) -> None:
    shown = kernel.run("%%px --noblock --out later\ntime.sleep(0.1)\nprint('late')")
    assert re.fullmatch(r"<Call \d+ of %%px: .*>", shown.data[0]["text/plain"])
    assert by_rank(kernel.run("%pxresult")) == everywhere("late")
    assert kernel.run("later.result(), later.done").data[0]["text/plain"] == "([None, None, None, None], True)"


def test_a_cell_runs_here_too_with_local(kernel: Kernel) -> None:
    shown = kernel.run("%%px --local\nboth = 7\nprint('both')")
    assert shown.out.startswith("both\n")
    assert by_rank(shown) == everywhere("both")
    assert kernel.run("both").data[0]["text/plain"] == "7"


def test_pxconfig_sets_where_lines_run(kernel: Kernel) -> None:
    try:
        kernel.run("%pxconfig --targets 1,2")
        assert by_rank(kernel.run("%px dist.get_rank()")) == {1: "1", 2: "2"}
        assert kernel.run("%pxconfig --targets 8").error == "PlanError"
    finally:
        kernel.run("%pxconfig --targets all")
    assert_works(kernel)


def test_autopx_sends_every_cell_until_it_is_switched_off(kernel: Kernel) -> None:
    assert kernel.run("%autopx").out == "%autopx enabled\n"
    shown = kernel.run("only_there = dist.get_rank()\nonly_there")
    failed = kernel.run("1 / 0")
    assert kernel.run("%autopx").out == "%autopx disabled\n"
    assert by_rank(shown) == {rank: str(rank) for rank in range(4)}
    assert failed.error == "RankError"
    assert kernel.run("'only_there' in globals()").data[0]["text/plain"] == "False"


def test_an_error_on_one_rank_is_shown_with_its_line_and_without_the_lab(kernel: Kernel) -> None:
    cell = "%%px\nx = torch.ones(1)\nif dist.get_rank() == 2:\n    raise ValueError('boom')\ndist.all_reduce(x)"
    shown = kernel.run(cell)
    assert shown.error == "RankError"
    assert "[rank 2] ValueError: boom" in shown.message
    assert "raise ValueError('boom')" in shown.message
    assert "ranks 0, 1 and 3 waited for the failed ranks and were freed." in shown.message
    assert "labkit/" not in shown.traceback
    assert len(shown.traceback.splitlines()) < 10
    assert not shown.err
    assert_works(kernel)


def test_an_error_in_a_function_of_the_notebook_names_its_cell(kernel: Kernel) -> None:
    kernel.run("def wrong():\n    return 1 / 0\n")
    shown = kernel.run("ranks.run(wrong)")
    assert "[ranks 0, 1, 2 and 3] ZeroDivisionError: division by zero at Cell In[" in shown.message
    assert "return 1 / 0" in shown.message
    assert shown.traceback.startswith("cell, line 1: ranks.run(wrong)\nRankError: ")


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("exit()", "SystemExit"),
        ("quit", "SystemExit"),
        ("import sys; sys.exit(2)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("a b", "SyntaxError"),
        ("%no_such_magic", "UsageError"),
    ],
)
def test_cells_that_fail_end_no_rank(kernel: Kernel, cell: str, kind: str) -> None:
    pids = kernel.run("ranks.pids").data
    shown = kernel.run(f"%%px\n{cell}")
    assert shown.error == "RankError"
    assert f"[ranks 0, 1, 2 and 3] {kind}" in shown.message
    assert not shown.err
    assert_works(kernel)
    assert kernel.run("ranks.pids").data == pids


def test_top_level_await(kernel: Kernel) -> None:
    shown = kernel.run("%%px\nimport asyncio\nawait asyncio.sleep(0.01)\n'awaited'")
    assert by_rank(shown) == everywhere("'awaited'")


@pytest.mark.parametrize(
    "wait",
    [
        "%%px\nprint('begun', flush=True)\ntime.sleep(600)",
        "%%px\nprint('begun', flush=True)\ndist.all_reduce(torch.ones(1)) if dist.get_rank() else time.sleep(600)",
        "print('begun')\nranks.run(time.sleep, 600)",
    ],
    ids=["sleep", "collective", "run"],
)
def test_the_stop_button_frees_the_ranks(kernel: Kernel, wait: str) -> None:
    pids = kernel.run("ranks.pids").data
    shown = kernel.run(wait, interrupt_after="begun")
    assert shown.error == "KeyboardInterrupt"
    assert len(shown.traceback.splitlines()) < 5
    assert_works(kernel)
    assert kernel.run("ranks.pids").data == pids


@pytest.mark.parametrize(
    ("death", "text"),
    [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "was killed by SIGKILL")],
    ids=["exit", "kill"],
)
def test_a_rank_that_dies_in_a_cell_is_named_and_comes_back(kernel: Kernel, death: str, text: str) -> None:
    shown = kernel.run(f"%%px\nif dist.get_rank() == 1:\n    {death}\ndist.barrier()")
    assert shown.error == "RankLost"
    assert text in shown.message
    assert "[rank 1]" in shown.message
    assert "ranks.restart(1)" in shown.message
    assert kernel.run("%%px\n1").error == "RankLost"
    assert by_rank(kernel.run("%%px --targets 0,2,3\n1")) == {0: "1", 2: "1", 3: "1"}
    assert not kernel.run("ranks.restart(1)").error
    assert not kernel.run("%%px --targets 1\nimport os, time, torch\nimport torch.distributed as dist").error
    assert_works(kernel)


def test_status_is_a_table(kernel: Kernel) -> None:
    (data,) = kernel.run("ranks.status()").data
    assert data["text/html"].count("<tr>") == 5
    assert len(data["text/plain"].splitlines()) == 5


def test_second_ranks_lost_ranks_and_stopped_ranks(kernel: Kernel) -> None:
    assert not kernel.run("first = ranks\nranks = lk.cluster.start(2)").error
    try:
        assert by_rank(kernel.run("%px 7")) == {0: "7", 1: "7"}
        assert kernel.run("%%px\nimport os\nos._exit(4)").error == "RankLost"
        lost = kernel.run("%px 7")
        assert lost.error == "RankLost"
        assert "ranks 0 and 1 are gone (exit code 4)" in lost.message
        kernel.run("%autopx")
        assert "disabled" in kernel.run("%autopx").out
        kernel.run("ranks.stop()\nranks.stop()")
        stopped = kernel.run("%px 7")
        assert stopped.error == "ClusterError"
        assert "were stopped. Start new ones" in stopped.message
        assert kernel.run("first.run(lambda: 1)").data[0]["text/plain"] == "[1, 1, 1, 1]"
    finally:
        kernel.run("ranks.stop()\nranks = first")


def test_a_plain_ipython_shell(tmp_path: pathlib.Path, repository: pathlib.Path) -> None:
    script = tmp_path / "session.ipy"
    script.write_text(
        "import labkit as lk\n"
        "if __name__ == '__main__':\n"
        "    ranks = lk.cluster.start(1)\n"
        "    get_ipython().run_cell_magic('px', '', 'print(\"in a rank\")\\n40 + 2')\n"
        "    get_ipython().run_cell_magic('px', '', '1 / 0')\n"
    )
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(repository), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    said = done.stdout + done.stderr
    assert "[rank 0] in a rank\n[rank 0] 42\n" in said, said
    assert "RankError: [rank 0] ZeroDivisionError: division by zero" in said, said
    assert "labkit/cluster" not in said, said
