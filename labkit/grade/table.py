"""The class as a table of text: points and status of each question, and the total."""

from labkit.exercise import Gradebook

__all__ = ["class_table"]


def class_table(gradebook: Gradebook) -> str:
    """The table that `labkit grade` prints: a row for each student, names to the left, totals to the right."""
    head = ["student", *gradebook.questions, "total"]
    rows = [
        [student, *(f"{one.score:>2} {one.status}" for one in gradebook.of(student)), str(gradebook.score(student))]
        for student in gradebook.students
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    num = len(rows)
    lines = [f"{num} student{'s' * (num != 1)}, {gradebook.max_score} points each"]
    for row in [head, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1].rjust(widths[-1])]))
    return "\n".join(lines)
