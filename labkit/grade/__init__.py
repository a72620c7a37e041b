"""Grading: `check` in the notebook, `labkit grade` for a class."""
