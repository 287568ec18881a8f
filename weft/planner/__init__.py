"""The Plan of a run, and memory, time, money and energy of a layout. Needs no torch."""

from weft.planner.make_plan import check_fits, make_plan, plan
from weft.planner.plan import AXES, Plan
from weft.planner.rules.known_rules import RUNNABLE, check

__all__ = ["AXES", "RUNNABLE", "Plan", "check", "check_fits", "make_plan", "plan"]
