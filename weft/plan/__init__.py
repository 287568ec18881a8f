"""Memory, time and layout of a run, worked out without torch. `weft.plan(job)` gives the Plan of a job."""

from weft.job.rooms import make_callable
from weft.plan.layout import AXES, Plan
from weft.plan.make import check_fits, make_plan
from weft.plan.rules import RUNNABLE, check

make_callable(__name__, "weft.plan.make", "plan_of")

__all__ = ["AXES", "RUNNABLE", "Plan", "check", "check_fits", "make_plan"]
