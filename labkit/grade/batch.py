"""From a folder of submissions to a gradebook and its report: in threads, kept as it goes, stopped at any time."""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from labkit import checks
from labkit.errors import LabError, PlanError, listed, text_of
from labkit.exercise import Gradebook, Observation, Outcome, Result, mark
from labkit.grade import report
from labkit.grade.kept import Kept
from labkit.grade.limits import Limits
from labkit.grade.progress import Progress
from labkit.grade.question import grade
from labkit.grade.sandbox import choose
from labkit.grade.stopping import StoppableSandbox, Stopped
from labkit.grade.submissions import Handed, Submission, Submissions, read

__all__ = ["Batch", "grade_folder", "run"]

RESULTS = ".results"
LOCK = ".lock"
LOOK_S = 0.5
_DEFAULT = Limits()

_Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A graded folder.

    Attributes:
        gradebook: the results.
        page: the page of the class, to open in a browser.
        failures: what kept the grader from grading an answer, by (student, question): no fault of the student's. Such
            an answer has an "error" in the gradebook and is tried again by the next run.
    """

    gradebook: Gradebook
    page: pathlib.Path
    failures: Mapping[_Pair, str]


def grade_folder(
    submissions: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    jobs: int = 1,
    seed: int = 0,
    questions: Sequence[str] | None = None,
    no_sandbox: bool = False,
    limits: Limits = _DEFAULT,
    progress: Callable[[Progress], None] | None = None,
) -> Gradebook:
    """Grade every answer of a folder of submissions and write the report.

    Each result is kept under `OUT/.results` as soon as it is there: the same call goes on where it was ended, and runs
    again only what has changed.

    Args:
        submissions: a folder, or notebooks, of each student.
        out: the folder of the report; made if it does not exist.
        jobs: how many answers run at once, each on ranks of its own: about a GiB and a core each, better two.
        seed: draws the hidden cases.
        questions: which to grade; None takes all of the chapters that occur.
        no_sandbox: run answers as yourself, without a sandbox.
        limits: what one answer may use.
        progress: called with each step, in this thread.

    Raises:
        PlanError: there are no submissions, or a question or folder that cannot be.
        LabError: there is no sandbox on this machine, another batch writes to the same folder, or the report cannot be
            written.
    """
    return run(
        submissions,
        out,
        jobs=jobs,
        seed=seed,
        questions=questions,
        no_sandbox=no_sandbox,
        limits=limits,
        progress=progress,
    ).gradebook


def run(
    submissions: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    jobs: int = 1,
    seed: int = 0,
    questions: Sequence[str] | None = None,
    no_sandbox: bool = False,
    limits: Limits = _DEFAULT,
    progress: Callable[[Progress], None] | None = None,
) -> Batch:
    """As `grade_folder`; tells also what could not be graded, and where the report is."""
    if jobs < 1:
        raise PlanError(f"jobs={jobs}: at least one answer runs at a time. Use jobs=1.")
    folder, given = pathlib.Path(out).resolve(), pathlib.Path(submissions).resolve()
    if folder == given or given in folder.parents:
        raise PlanError(f"the report {folder} would lie among the submissions: choose another folder for --out.")
    handed_in = read(given, questions)
    chosen = choose(no_sandbox)
    sandbox = StoppableSandbox(program=chosen.program, words=chosen.words)
    with _alone_in(folder):
        with _writing(folder):
            kept = Kept(folder / RESULTS, seed=seed, limits=limits, sandbox=chosen.program)
        work = _Work(handed_in, kept, sandbox=sandbox, seed=seed, limits=limits)
        work.do(jobs, progress or (lambda _: None))
        gradebook = _gradebook(handed_in, work, seed, chosen.words, questions)
        with _writing(folder):
            page = report.write(gradebook, folder)
    return Batch(gradebook=gradebook, page=page, failures=work.failures)


class _Work:
    """Answers that are graded in threads: those that are done, those that run, those that could not be."""

    def __init__(
        self, handed_in: Submissions, kept: Kept, *, sandbox: StoppableSandbox, seed: int, limits: Limits
    ) -> None:
        self._kept, self._sandbox, self._seed, self._limits = kept, sandbox, seed, limits
        self._lock = threading.Lock()
        self._running: list[_Pair] = []
        pairs = [(one, question) for one in handed_in.students for question in handed_in.questions]
        self.num_total = len(pairs)
        self.results: dict[_Pair, Result] = {}
        self.failures: dict[_Pair, str] = {}
        self._left: list[tuple[Submission, str]] = []
        for one, question in pairs:
            if found := kept.find(one.student, question, one.handed[question]):
                self.results[one.student, question] = found
            else:
                self._left.append((one, question))
        self._num_kept = len(self.results)

    def do(self, jobs: int, progress: Callable[[Progress], None]) -> None:
        """Grade what is left; when interrupted, end what runs and keep what is done."""
        began_s = time.monotonic()
        pool = concurrent.futures.ThreadPoolExecutor(jobs, thread_name_prefix="labkit-grade")
        futures = {pool.submit(self._grade, one, question) for one, question in self._left}
        progress(self._progress(began_s))
        try:
            while futures:
                done, futures = concurrent.futures.wait(futures, LOOK_S, return_when=concurrent.futures.FIRST_COMPLETED)
                for one in done:
                    progress(self._progress(began_s, one.result()))
                if not done:
                    progress(self._progress(began_s))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._end(futures)
            progress(self._progress(began_s))
        pool.shutdown(wait=True)

    def _end(self, futures: set[concurrent.futures.Future[str]]) -> None:
        """End what still runs, however often Ctrl-C is pressed meanwhile."""
        while not all(one.done() for one in futures):
            with contextlib.suppress(KeyboardInterrupt):
                self._sandbox.stop()
                concurrent.futures.wait(futures, 0.1)

    def _progress(self, began_s: float, finished: str = "") -> Progress:
        with self._lock:
            return Progress(
                num_done=len(self.results) + len(self.failures),
                num_total=self.num_total,
                num_kept=self._num_kept,
                elapsed_s=time.monotonic() - began_s,
                running=tuple(self._running),
                finished=finished,
            )

    def _grade(self, submission: Submission, question: str) -> str:
        """Grade one answer; returns how it ended, in words."""
        pair = (submission.student, question)
        with self._lock:
            self._running.append(pair)
        try:
            return self._graded(pair, submission.handed[question])
        except Stopped:
            return ""
        except Exception as error:  # the grader's own: one answer goes without a result, the others go on
            with self._lock:
                self.failures[pair] = text_of(error) or type(error).__name__
            return f"{' '.join(pair)}: not graded: {text_of(error)}"
        finally:
            with self._lock:
                self._running.remove(pair)

    def _graded(self, pair: _Pair, handed: Handed) -> str:
        exercise = checks.exercise(pair[1])
        if handed.unreadable:
            result = _not_run(pair[1], "raised", handed.unreadable, self._seed)
        elif handed.absent:
            result = _not_run(pair[1], "missing", handed.absent, self._seed, handed.notes)
        else:
            result = grade(
                exercise,
                handed.answer,
                seed=self._seed,
                sandbox=self._sandbox,
                limits=self._limits,
                notes=handed.notes,
            )
        if self._sandbox.stopped.is_set():  # what was killed on the way out says nothing of the answer
            raise Stopped("the batch is being stopped.")
        self._kept.keep(*pair, handed, result)
        with self._lock:
            self.results[pair] = result
        return f"{' '.join(pair)}: {result.status}, {result.score} of {result.max_score}"


def _not_run(question: str, outcome: Outcome, why: str, seed: int, notes: Sequence[str] = ()) -> Result:
    """The result of an answer that was not run; the idea of one that ran and failed does not fit it."""
    exercise = checks.exercise(question)
    cases = exercise.cases(seed)
    seen = [Observation(outcome=outcome, message=why)] * len(cases)
    return dataclasses.replace(mark(exercise, cases, seen, notes), idea=None)


def _coverage(questions: Sequence[str] | None) -> tuple[str, ...]:
    """Says of a report on some questions that it is none on all."""
    if questions is None or not set(checks.QUESTIONS) - set(questions):
        return ()
    return (
        f"this report covers {listed(questions)} alone: results of other questions are kept, and a run without "
        "--questions shows all.",
    )


def _gradebook(
    handed_in: Submissions, work: _Work, seed: int, words: str, questions: Sequence[str] | None
) -> Gradebook:
    results = dict(work.results)
    remarks = {one.student: list(one.remarks) for one in handed_in.students}
    for (student, question), why in work.failures.items():
        results[student, question] = _not_run(question, "raised", f"not graded, by no fault of the answer: {why}", seed)
        remarks[student].append(f"{question} was not graded, by no fault of the answer: grade the folder again.")
    return Gradebook(
        students=tuple(one.student for one in handed_in.students),
        questions=handed_in.questions,
        results=results,
        remarks={student: tuple(said) for student, said in remarks.items() if said},
        notes=(*handed_in.notes, *_coverage(questions)),
        sandbox=words,
        seed=seed,
    )


@contextlib.contextmanager
def _writing(folder: pathlib.Path) -> Iterator[None]:
    """Tell of a full disk, or of something in the way, in one line."""
    try:
        yield
    except OSError as error:
        at = f" ({error.filename2 or error.filename})" if error.filename else ""
        raise LabError(
            f"the report in {folder} cannot be written: {error.strerror}{at}. Results are kept as far as there was "
            "room: the same command goes on from there."
        ) from None


@contextlib.contextmanager
def _alone_in(folder: pathlib.Path) -> Iterator[None]:
    """Hold a folder for one batch; the lock goes with the process, however that ends."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PlanError(f"{folder} cannot be a folder to write to: {error.strerror}.") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError(f"another batch writes to {folder}: wait for its end, or choose another --out.") from None
        yield
    finally:
        os.close(handle)
