"""Plan x ranks -> Run; layouts x ranks -> Parity."""

from labkit.launch.comparing import parity
from labkit.launch.equality import BANDS, Bands, Comparison, Parity, Reference
from labkit.launch.progress import Progress
from labkit.launch.run import Run
from labkit.launch.submit import last_run, train

__all__ = [
    "BANDS",
    "Bands",
    "Comparison",
    "Parity",
    "Progress",
    "Reference",
    "Run",
    "last_run",
    "parity",
    "train",
]
