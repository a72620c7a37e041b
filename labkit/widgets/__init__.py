"""The lab in sliders: `cockpit(ranks)`. Reaches processes only through `launch`."""

from labkit.widgets.cockpit import Cockpit, cockpit

__all__ = ["Cockpit", "cockpit"]
