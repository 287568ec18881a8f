"""Jobs from the configuration files of other libraries: one file a format, with its table of settings.

Registers the command `weft convert`.
"""

from weft.cli.commands import COMMANDS, MACHINE, Command

COMMANDS.register(Command("convert", "weft.extensions.convert.command:convert", MACHINE))
