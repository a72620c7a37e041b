"""The command line: `labkit lab | doctor`. Parses, calls `commands`, turns errors into one line and an exit code."""

import argparse
import os
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
    return top


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
        return commands.doctor(num_ranks=options.ranks, as_json=options.json)
    except LabError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `labkit doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: it starts at 1, for example 4")
    return number
