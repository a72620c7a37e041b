"""The command line: `labkit lab | doctor | compile | explain | exercises | grade`. Parses and calls `commands`."""

import argparse
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from labkit import __version__, commands
from labkit.errors import LabError

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(prog="labkit", description="A training lab you can touch: real ranks, real steps.")
    top.add_argument("--version", action="version", version=f"labkit {__version__}")
    actions = top.add_subparsers(dest="action", required=True, metavar="command")
    lab = actions.add_parser("lab", help="open JupyterLab on the first notebook")
    lab.add_argument("--port", help="port on this machine (default: PORT, else a free one from 8888 on)")
    lab.add_argument("--no-browser", action="store_true", help="only print the address (also: NO_BROWSER=1)")
    doctor = actions.add_parser("doctor", help="say what this machine can do and what is wrong with it")
    doctor.add_argument("--json", action="store_true", help="facts and findings as JSON")
    doctor.add_argument("--ranks", type=_count, default=4, help="how many ranks you want to run (default: 4)")
    actions.add_parser(
        "compile",
        help="compile DeepSpeed's operations into this environment (make lab does it too)",
        description="Compile the operations that DeepSpeed would compile at their first use: a minute or two, once. "
        "Does nothing where they are there and fit.",
    )
    _add_explain(actions)
    _add_exercises(actions)
    _add_grade(actions)
    return top


def _add_explain(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    explain = actions.add_parser(
        "explain",
        help="say what a DeepSpeed configuration or log means, and what is wrong with it",
        description="Find out what FILE is, and explain it: mistakes first, then what may not be meant, then what is "
        "worth knowing, then every field with its unit and default.",
        epilog="Exit code: 0 no mistake, 1 there are mistakes, 2 the file cannot be read or is of no known kind.",
    )
    explain.add_argument("file", metavar="FILE", type=pathlib.Path, help="the file")
    explain.add_argument("--json", action="store_true", help="everything as JSON")
    explain.add_argument(
        "--world-size", metavar="N", type=_count, help="ranks that take part, to check the batch sizes"
    )
    explain.add_argument(
        "--model", metavar="PRESET", help="what is trained, such as llama3-8b, to check sizes against it"
    )


def _add_exercises(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    exercises = actions.add_parser("exercises", help="make the exercises from their solutions")
    build = exercises.add_subparsers(dest="act", required=True, metavar="build").add_parser(
        "build",
        help="write exercises/ from solutions/",
        description="Write exercises/NN_topic.ipynb for every solutions/NN_topic.ipynb: without solutions, hidden "
        "tests and outputs. Only what differs is written.",
        epilog="Exit code: 0 exercises are what the solutions make of them, 1 they are not, 2 wrong usage.",
    )
    build.add_argument("--check", action="store_true", help="write nothing; say what differs, and exit with 1")
    build.add_argument(
        "--folder", type=pathlib.Path, help="where solutions/ and exercises/ are (default: labkit's checkout)"
    )


def _add_grade(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    grade = actions.add_parser(
        "grade",
        help="grade a folder of submissions",
        description="Grade every answer in SUBMISSIONS on ranks of its own, behind a sandbox, also on hidden cases, "
        "and write a report: index.html, a page for each student, scores.csv, results.json, Gradescope's form. "
        "A student is a folder with notebooks at any depth, or a file such as s01.ipynb or s01_06_ring_and_tree.ipynb, "
        "also as Moodle, Canvas and nbgrader name them. Of two notebooks of one chapter the newest counts. What the "
        "grader takes of it is the cell that defines an answer and what that needs from other cells. Results are kept "
        "as they come: the same command goes on where it was ended, and grades again only what has changed. The report "
        "is written at the end.",
        epilog="Exit code: 0 every answer was graded, 1 one could not be, or nothing could, 2 wrong usage, "
        "130 interrupted.",
    )
    grade.add_argument("submissions", metavar="SUBMISSIONS", type=pathlib.Path, help="the folder of submissions")
    grade.add_argument("--out", metavar="REPORT", type=pathlib.Path, required=True, help="the folder of the report")
    grade.add_argument("--jobs", metavar="N", type=_jobs, default=1, help="answers at once (default: 1)")
    grade.add_argument(
        "--questions",
        metavar="Q",
        type=_questions,
        help="such as 06.1,06.2 (default: all of the chapters that occur); the report then covers these alone, also "
        "where REPORT had more: results of others are kept, and a run without --questions shows all",
    )
    grade.add_argument("--seed", metavar="N", type=int, default=0, help="draws the hidden cases (default: 0)")
    grade.add_argument(
        "--no-sandbox",
        action="store_true",
        help="run answers as yourself: they can read your files and the hidden checks, and use the network",
    )
    grade.add_argument("--timeout", metavar="S", type=_seconds, help="seconds that one case may take (default: 10)")


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name; None takes the process's own.
        environment: variables to read PORT and NO_BROWSER from; None takes the process's own.

    Returns:
        The exit code: 0 done, 1 something is wrong, 2 wrong usage, 130 interrupted.
    """
    options = parser().parse_args(arguments)
    variables = os.environ if environment is None else environment
    try:
        if options.action == "lab":
            given = options.port or variables.get("PORT") or None
            browser = not options.no_browser and variables.get("NO_BROWSER", "") in {"", "0"}
            return commands.lab(port=given, browser=browser)
        if options.action == "compile":
            return commands.compile_operations()
        if options.action == "explain":
            return commands.explain(
                file=options.file, as_json=options.json, world_size=options.world_size, model=options.model
            )
        if options.action == "exercises":
            return commands.exercises(folder=options.folder, check=options.check)
        if options.action == "grade":
            return commands.grade(
                submissions=options.submissions,
                out=options.out,
                jobs=options.jobs,
                questions=options.questions,
                seed=options.seed,
                no_sandbox=options.no_sandbox,
                timeout_s=options.timeout,
            )
        return commands.doctor(num_ranks=options.ranks, as_json=options.json)
    except LabError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `labkit doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _count(text: str, what: str = "number of ranks", example: int = 4) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}: it starts at 1, for example {example}")
    return number


def _jobs(text: str) -> int:
    return _count(text, "number of jobs", 2)


def _questions(text: str) -> list[str]:
    found = [one.strip() for one in text.split(",") if one.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no question: for example 06.1,06.2")
    return found


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: it is above 0, for example 10")
    return number
