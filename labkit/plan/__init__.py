"""Model x Layout -> Plan: groups, layers and actions of every rank; or a DeepSpeed configuration -> Plan."""

from labkit.plan.build import build
from labkit.plan.holding import Holding
from labkit.plan.importing import Explanation, from_deepspeed
from labkit.plan.moves import Moves, moves
from labkit.plan.plan import AXES, Placement, Plan

__all__ = ["AXES", "Explanation", "Holding", "Moves", "Placement", "Plan", "build", "from_deepspeed", "moves"]
