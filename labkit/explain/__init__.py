"""A file -> what kind it is, and the verdict on it."""

from labkit.explain.recognition import READERS, Reader, explain
from labkit.explain.verdict import Verdict

__all__ = ["READERS", "Reader", "Verdict", "explain"]
