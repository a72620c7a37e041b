"""Plan x ranks -> Run; layouts x ranks -> Parity; a live state x plan -> Switch."""

from labkit.launch.comparing import parity
from labkit.launch.equality import BANDS, Bands, Comparison, Parity, Reference
from labkit.launch.progress import Progress
from labkit.launch.run import Run
from labkit.launch.submit import last_run, train
from labkit.launch.switch import Switch, switch

__all__ = [
    "BANDS",
    "Bands",
    "Comparison",
    "Parity",
    "Progress",
    "Reference",
    "Run",
    "Switch",
    "last_run",
    "parity",
    "switch",
    "train",
]
