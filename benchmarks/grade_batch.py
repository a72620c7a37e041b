"""A class of twelve submissions, nine of them trouble, graded as `labkit grade` does: each row, and the time it took.

    python -m benchmarks.grade_batch [--pairs N]

The number of pairs is not used: the batch runs once, one answer at a time.
"""

import pathlib
import sys
import tempfile
import time

import psutil

from benchmarks.pairs import arguments, json_line, say
from labkit.grade import batch
from labkit.grade.limits import Limits
from labkit.grade.progress import Bar
from labkit.grade.table import class_table
from tests.grade import twelve

CASE_S = 4.0
SEED = 3
QUESTION = "06.1"


def main() -> int:
    """Grade the class; 0 when each submission got exactly its row and no process is left."""
    arguments(__doc__)
    with tempfile.TemporaryDirectory(prefix="labkit-class-") as folder:
        root = pathlib.Path(folder)
        twelve.write(root / "class", pathlib.Path(__file__).resolve().parents[1])
        bar = Bar()
        began_s = time.monotonic()
        done = batch.run(
            root / "class",
            root / "report",
            seed=SEED,
            questions=[QUESTION],
            limits=Limits(case_s=CASE_S),
            progress=bar,
        )
        bar.end()
        seconds = time.monotonic() - began_s
    book = done.gradebook
    say(f"sandbox: {book.sandbox}")
    print(class_table(book))
    print(f"  {'submission':34}  seconds  row")
    missed = []
    for student, expected in twelve.EXPECTED.items():
        result = book.results[student, QUESTION]
        met = (result.status, result.score) == expected
        missed += [] if met else [student]
        print(f"  {student}: {twelve.WHAT[student]:29}  {result.seconds:7.1f}  {'as it must be' if met else 'MISSED'}")
    left = psutil.Process().children(recursive=True)
    print(f"  in all {seconds:.0f} s, {len(left)} processes left")
    met = not missed and not left and not done.failures
    by_student = {student: round(book.results[student, QUESTION].seconds, 2) for student in book.students}
    json_line("grade_batch", seconds=round(seconds, 1), by_student=by_student, missed=missed, left=len(left), met=met)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
