"""Plan x ranks -> Run."""

from labkit.launch.progress import Progress
from labkit.launch.run import Run
from labkit.launch.submit import last_run, train

__all__ = ["Progress", "Run", "last_run", "train"]
