"""Two traces of a step side by side: what each takes, where they part, and why."""

from labkit.compare.comparing import traces
from labkit.compare.comparison import Cause, Comparison, Row, Span

__all__ = ["Cause", "Comparison", "Row", "Span", "traces"]
