"""Why a run is slow, or why it failed: causes with their evidence, what each costs, and what to change.

Registers the command `weft diagnose`.
"""

from weft.cli.commands import COMMANDS, WATCH, Command

COMMANDS.register(Command("diagnose", "weft.extensions.diagnose.command:diagnose", WATCH))
