"""The suite in several processes: which tests stay together, which begin, and what it says while it runs."""

import faulthandler
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Rough seconds of a test by its marker: enough to begin with what takes long, so that the halves end together.
SECONDS = {"browser": 30.0, "slow": 25.0, "nbgrader": 10.0, "sandbox": 4.0, "ranks": 2.0}
SECONDS_UNMARKED = 0.05
LONG_TEST_S = 10.0
STACKS_AT = 0.98  # of the time limit
ALONE = "tests/notebooks/"  # nothing is shared in these files: each test goes by itself
TOGETHER = "tests/grade/"  # sandboxes of two graders would share their users: never two at once


def scope_of(nodeid: str) -> str:
    """What runs in one process, one after the other: a file, whose fixtures its tests share."""
    if nodeid.startswith(ALONE):
        return nodeid
    return TOGETHER if nodeid.startswith(TOGETHER) else nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Order the tests by what their scopes take, the longest first; within a file nothing moves."""
    seconds: Counter[str] = Counter()
    for item in items:
        marked = [SECONDS[name] for name in SECONDS if item.get_closest_marker(name)]
        seconds[scope_of(item.nodeid)] += sum(marked) or SECONDS_UNMARKED
    items.sort(key=lambda item: -seconds[scope_of(item.nodeid)])


def register(config: pytest.Config) -> None:
    """Take part in a run: as one of its processes, or as the one that hands tests out to them."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Half())
    elif getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(HandingOut())
        if config.option.verbose == 0:
            config.pluginmanager.register(Progress(config))


class Half:
    """In a process that runs tests: what the process with the terminal cannot know."""

    def __init__(self) -> None:
        self._stderr = os.dup(sys.__stderr__.fileno())  # the terminal's, before tests' own is caught

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Iterator[None]:
        """Keep what is wrong with the arguments."""
        try:
            return (yield)
        except pytest.UsageError as error:
            session.config.workeroutput["wrong_arguments"] = "; ".join(map(str, error.args))
            raise

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put first what takes long."""
        longest_first(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        """Have the stacks written shortly before the time limit ends this process: what it says then goes nowhere."""
        faulthandler.dump_traceback_later(settings.timeout * STACKS_AT, file=self._stderr)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> None:
        """The test has ended in time."""
        faulthandler.cancel_dump_traceback_later()


class HandingOut:
    """In the process that hands tests out: how."""

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> "Scheduling":
        """By scopes."""
        return Scheduling(config, log)


class Scheduling(LoadScopeScheduling):
    """Hands out scopes; a test that ended its process (a time limit does) is not run again, the others are."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Take the work of an ended process back; returns the test that it was in."""
        unfinished = {
            scope: {nodeid: done for nodeid, done in tests.items() if not done}
            for scope, tests in self.assigned_work.pop(node).items()
        }
        ended_in = next((nodeid for tests in unfinished.values() for nodeid in tests), None)
        for scope, tests in unfinished.items():
            tests.pop(ended_in or "", None)
            if tests:
                self.workqueue[scope] = tests
        return ended_in


class Progress:
    """Says a line for each file that is done, each long test and each failure, in place of a dot for each test."""

    def __init__(self, config: pytest.Config) -> None:
        self._terminal = config.pluginmanager.getplugin("terminalreporter")
        self._began_s = time.monotonic()
        self._left: Counter[str] = Counter()
        self._num_tests = 0
        self._outcomes: dict[str, Counter[str]] = {}
        self._seconds: Counter[str] = Counter()
        self._said: set[str] = set()
        self._quiet = True

    def pytest_testnodedown(self, node: Any) -> None:
        """What a process found wrong with the arguments is said here, once: it has no terminal of its own."""
        wrong = getattr(node, "workeroutput", {}).get("wrong_arguments", "")
        if wrong and wrong not in self._said:
            self._said.add(wrong)
            self._terminal.write_line(f"ERROR: {wrong}", red=True)

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Count the tests of each file, once: every process collects the same."""
        if not self._num_tests:
            self._num_tests = len(ids)
            self._left.update(_file_of(nodeid) for nodeid in ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letter, but the right count, while tests run."""
        if not self._quiet or hasattr(report, "wasxfail") or report.outcome == "rerun":
            return None
        if report.failed:
            return ("error" if report.when in ("setup", "teardown") else "failed"), "", ""
        if report.skipped:
            return "skipped", "", ""
        return ("passed" if report.when == "call" else ""), "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember what became of a test; say at once that one failed or took long."""
        file = _file_of(report.nodeid)
        self._seconds[file] += report.duration
        if report.when == "call" or not report.passed:
            self._outcomes.setdefault(file, Counter())[report.outcome] += 1
        if report.failed:
            self._say(f"FAILED {report.nodeid}", red=True)
        elif report.when == "call" and report.duration >= LONG_TEST_S:
            self._say(f"{report.nodeid} {report.outcome} in {report.duration:.0f} s")
        if report.when not in ("setup", "call"):
            self._done(file)

    def pytest_sessionfinish(self) -> None:
        """The summary has its usual words."""
        self._quiet = False

    def _done(self, file: str) -> None:
        self._left[file] -= 1
        if not self._left[file]:
            counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self._outcomes[file].items()))
            self._say(f"{file}: {counts} in {self._seconds[file]:.0f} s")

    def _say(self, what: str, **colour: bool) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began_s), 60)
        done = 1 - self._left.total() / self._num_tests
        self._terminal.write_line(f"{minutes:3d}:{seconds:02d} {done:4.0%}  {what}", **colour)


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
