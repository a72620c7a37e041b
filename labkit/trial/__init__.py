"""Runs an answer on ranks, case by case, and says what was seen, in a notebook or in a sandbox."""

from labkit.trial.running import Answer, observe

__all__ = ["Answer", "observe"]
