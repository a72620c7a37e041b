"""Models, layouts, devices and training settings as checked values; nothing here runs or imports torch."""

from labkit.spec.fp8 import Fp8
from labkit.spec.hardware import DEVICES, Hardware
from labkit.spec.layout import Layout
from labkit.spec.model import Model
from labkit.spec.presets import PRESETS
from labkit.spec.training import Pace, Training

__all__ = ["DEVICES", "PRESETS", "Fp8", "Hardware", "Layout", "Model", "Pace", "Training"]
