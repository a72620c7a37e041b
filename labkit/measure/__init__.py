"""What ranks did, on one clock: raw records of a run -> `Trace`; and what they keep."""

from labkit.measure.alignment import Alignment, Offsets, sample_offsets
from labkit.measure.keeping import States, activations, states
from labkit.measure.tracing import events, trace

__all__ = ["Alignment", "Offsets", "States", "activations", "events", "sample_offsets", "states", "trace"]
