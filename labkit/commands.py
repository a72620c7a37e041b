"""What each command of the command line does; returns the exit code."""

import dataclasses
import json

from labkit import doctor as examine
from labkit import doctor_facts, notebook_server
from labkit.errors import LabError

__all__ = ["doctor", "lab"]


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
