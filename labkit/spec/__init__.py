"""Models, layouts, devices and training settings as checked values; nothing here runs or imports torch."""

from labkit.spec.devices import DEVICES, LINKS, Link
from labkit.spec.fp8 import Fp8
from labkit.spec.hardware import Hardware
from labkit.spec.layout import Layout
from labkit.spec.model import Model
from labkit.spec.presets import PRESETS
from labkit.spec.training import Pace, Training

__all__ = ["DEVICES", "LINKS", "PRESETS", "Fp8", "Hardware", "Layout", "Link", "Model", "Pace", "Training"]
