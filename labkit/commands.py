"""What each command of the command line does; returns the exit code."""

import dataclasses
import importlib
import json
import pathlib
import sys
from collections.abc import Sequence

from labkit import compiled, compiling, doctor_facts, notebook_server
from labkit import doctor as examine
from labkit.errors import LabError
from labkit.explain import explain as explain_file
from labkit.grade import building

__all__ = ["compile_operations", "doctor", "exercises", "explain", "grade", "lab"]


def lab(*, port: str | None, browser: bool) -> int:
    """Serve JupyterLab until it is ended.

    Raises:
        LabError: the port is impossible or taken.
    """
    number = None
    if port is not None:
        if not port.isascii() or not port.isdigit():
            raise LabError(f"PORT={port!r} is no port: it is a number from 1 to 65535. PORT=8888 is the usual one.")
        number = int(port)
    notebook_server.serve(port=number, browser=browser)
    return 0


def compile_operations() -> int:
    """Compile DeepSpeed's operations where that is needed.

    Raises:
        LabError: it cannot be done here.
    """
    done = compiling.compile_operations()
    print(f"DeepSpeed's operations are {'now' if done else 'already'} in {compiled.folder()}")
    return 0


def doctor(*, num_ranks: int, as_json: bool) -> int:
    """Print what this machine can do; 1 when something blocks the lab."""
    facts = doctor_facts.gather()
    findings = examine.judge(facts, num_ranks=num_ranks)
    if as_json:
        report = {"facts": dataclasses.asdict(facts), "findings": [dataclasses.asdict(one) for one in findings]}
        print(json.dumps(report, indent=2))
    else:
        print(examine.report(findings))
    return 1 if any(one.level == "blocks" for one in findings) else 0


def explain(*, file: pathlib.Path, as_json: bool, world_size: int | None, model: str | None) -> int:
    """Print what a file means; 1 when there are mistakes in it, 2 when it cannot be read or is of no known kind."""
    try:
        verdict = explain_file(file, model=model, world_size=world_size)
    except LabError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"file": str(file)} | verdict.to_json(), indent=2, ensure_ascii=False) if as_json else verdict)
    return 1 if verdict.num_mistakes else 0


def exercises(*, folder: pathlib.Path | None, check: bool) -> int:
    """Make `exercises/` from `solutions/`, or compare only; 1 when something differs that is not put right.

    Args:
        folder: where both are; None takes the checkout that labkit runs from, else the current folder.
        check: whether to compare only.

    Raises:
        LabError: a solution has marks that do not fit.
    """
    root = folder or notebook_server.home()
    act = building.differences if check else building.build
    found = act(root / "solutions", root / "exercises")
    for one in found:
        is_put_right = not check and one.text is not None
        print(f"{root / 'exercises' / one.name}: {one.how}{', now written' if is_put_right else ''}")
    if not found:
        print(f"{root / 'exercises'} is what {root / 'solutions'} makes of it")
    return 1 if any(check or one.text is None for one in found) else 0


def grade(
    *,
    submissions: pathlib.Path,
    out: pathlib.Path,
    jobs: int,
    questions: Sequence[str] | None,
    seed: int,
    no_sandbox: bool,
    timeout_s: float | None,
) -> int:
    """Grade a folder, print the class, write the report; 1 when an answer could not be graded.

    Raises:
        LabError: there is nothing to grade, or no sandbox.
    """
    # These load numpy, plotly and what starts ranks: only who grades waits for them.
    batch, limits, progress, table = (
        importlib.import_module(f"labkit.grade.{name}") for name in ("batch", "limits", "progress", "table")
    )
    usual = limits.Limits()
    given = {} if timeout_s is None else {"case_s": timeout_s, "question_s": max(usual.question_s, 9 * timeout_s)}
    bar = progress.Bar()
    try:
        done = batch.run(
            submissions,
            out,
            jobs=jobs,
            questions=questions,
            seed=seed,
            no_sandbox=no_sandbox,
            limits=dataclasses.replace(usual, **given),
            progress=bar,
        )
    except KeyboardInterrupt:
        bar.end()
        if bar.last is not None:
            print(
                f"labkit: stopped; {bar.last.num_done} of {bar.last.num_total} results are kept, and no report of them "
                "is written yet: the same command goes on from here and writes it.",
                file=sys.stderr,
            )
        return 130
    bar.end()
    print(table.class_table(done.gradebook))
    for student, remarks in done.gradebook.remarks.items():
        for remark in remarks:
            print(f"{student}: {remark}")
    for note in done.gradebook.notes:
        print(f"note: {note}")
    print(f"sandbox: {done.gradebook.sandbox}")
    print(f"report: {done.page}")
    for (student, question), why in done.failures.items():
        print(f"labkit: {student} {question} was not graded: {why}", file=sys.stderr)
    return 1 if done.failures else 0
