"""The dashboard: runs in a browser or a terminal, live or finished, read from their folders.

Registers the command `weft dash`.
"""

from weft.cli.commands import COMMANDS, WATCH, Command

COMMANDS.register(Command("dash", "weft.extensions.dash.command:dash", WATCH))
