"""Fault injection: runs a job, injects faults, and compares it with the undisturbed run.

Registers the command `weft chaos`.
"""

from weft.cli.commands import COMMANDS, PLAN, Command

COMMANDS.register(Command("chaos", "weft.extensions.chaos.command:chaos", PLAN))
