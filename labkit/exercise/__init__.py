"""The values of grading: an exercise, its cases, what was seen of an answer, and the result."""

from labkit.exercise.exercise import Case, Criterion, Exercise, Finding, Idea, Measure
from labkit.exercise.gradebook import Gradebook
from labkit.exercise.mark import mark
from labkit.exercise.observation import Observation, Outcome, Wait
from labkit.exercise.result import CaseResult, Result, Status

__all__ = [
    "Case",
    "CaseResult",
    "Criterion",
    "Exercise",
    "Finding",
    "Gradebook",
    "Idea",
    "Measure",
    "Observation",
    "Outcome",
    "Result",
    "Status",
    "Wait",
    "mark",
]
