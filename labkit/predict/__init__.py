"""What a plan should take, before anything runs."""

from labkit.predict.timeline import bubble_fraction, timeline

__all__ = ["bubble_fraction", "timeline"]
