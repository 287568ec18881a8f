"""Settings of a job found by trials, for a low loss or for speed.

Registers the command `weft tune`.
"""

from weft.cli.commands import COMMANDS, PLAN, Command

COMMANDS.register(Command("tune", "weft.extensions.tune.command:tune", PLAN))
