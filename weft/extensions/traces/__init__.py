"""Traces: the steps of all ranks in one file for Perfetto, with the parts of a step, and NVTX ranges for Nsight.

Registers the command `weft trace`, and the observer behind `watch.trace` and `watch.nvtx`.
"""

from weft.cli.commands import COMMANDS, WATCH, Command
from weft.training.step_observers import OBSERVERS, ObserverKind

PACKAGE = __name__

COMMANDS.register(Command("trace", f"{PACKAGE}.command:trace", WATCH))
OBSERVERS.register(
    ObserverKind("trace", lambda job: job.watch.trace is not None or job.watch.nvtx, f"{PACKAGE}.tracer:tracer_of_job")
)
