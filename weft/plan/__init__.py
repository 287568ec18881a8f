"""Memory, time and layout of a run, worked out without torch."""

from weft.plan.layout import AXES, Plan
from weft.plan.make import check_fits, make_plan
from weft.plan.rules import RUNNABLE, check

__all__ = ["AXES", "RUNNABLE", "Plan", "check", "check_fits", "make_plan"]
