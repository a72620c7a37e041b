"""What a plan should take, before anything runs."""

from labkit.predict.states import state_bytes
from labkit.predict.timeline import bubble_fraction, timeline

__all__ = ["bubble_fraction", "state_bytes", "timeline"]
