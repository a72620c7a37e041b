"""Model x Layout -> Plan: groups, layers and actions of every rank."""

from labkit.plan.build import build
from labkit.plan.plan import AXES, Placement, Plan

__all__ = ["AXES", "Placement", "Plan", "build"]
