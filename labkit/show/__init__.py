"""Pictures of values: a trace, losses or memory in, a plotly figure out. Pure functions; no process, no torch."""

from labkit.show.losses import losses
from labkit.show.memory import memory
from labkit.show.timeline import timeline

__all__ = ["losses", "memory", "timeline"]
