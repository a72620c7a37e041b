"""The checks of every exercise, one file per chapter, loaded when a question is asked for: some need torch."""

import importlib

from labkit.errors import PlanError
from labkit.exercise import Exercise

__all__ = ["QUESTIONS", "exercise"]

# The question, and where its `Exercise` is.
QUESTIONS = {
    "02.1": "labkit.checks.data_parallel:ZERO1_STEP",
    "03.1": "labkit.checks.tensor_parallel:COLUMN_AND_ROW",
    "04.1": "labkit.checks.pipeline:ONE_F_ONE_B",
    "06.1": "labkit.checks.ring_and_tree:RING",
    "06.2": "labkit.checks.ring_and_tree:TREE",
    "10.1": "labkit.checks.deepspeed:REPAIR",
    "11.1": "labkit.checks.precision:DELAYED_SCALING",
}


def exercise(question: str) -> Exercise:
    """The exercise of a question.

    Raises:
        PlanError: there is no such question.
    """
    if question not in QUESTIONS:
        raise PlanError(f"there is no question {question!r}: the questions are {', '.join(QUESTIONS)}.")
    module, _, name = QUESTIONS[question].partition(":")
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, Exercise):
        raise TypeError(f"{QUESTIONS[question]} is no Exercise")
    return found
