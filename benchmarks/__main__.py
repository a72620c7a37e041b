"""Run every benchmark, each in a process of its own: `python -m benchmarks [--pairs N]`."""

import subprocess
import sys

from benchmarks.pairs import arguments, say

BENCHMARKS = (
    "trivial_cell",
    "cold_start",
    "interrupt",
    "train_step",
    "check",
    "grade_batch",
    "parity",
    "switch",
    "totals",
    "published",
)


def main() -> int:
    """Run all; the exit status says whether every bar was met."""
    options = arguments(__doc__)
    missed = []
    for name in BENCHMARKS:
        say(f"== {name}")
        command = [sys.executable, "-m", f"benchmarks.{name}", "--pairs", str(options.pairs)]
        if subprocess.run(command).returncode != 0:
            missed.append(name)
    if missed:
        say(f"not met: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
