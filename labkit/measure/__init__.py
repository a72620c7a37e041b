"""What ranks did, on one clock: raw records of a run -> `Trace`."""

from labkit.measure.alignment import Alignment, Offsets, sample_offsets
from labkit.measure.tracing import events, trace

__all__ = ["Alignment", "Offsets", "events", "sample_offsets", "trace"]
