"""Tokens of other libraries: Megatron's .bin with .idx, and nanoGPT's .bin.

Registers the command `weft data convert`.
"""

from weft.cli.commands import COMMANDS, MACHINE, Command

COMMANDS.register(
    Command("data convert", f"{__name__}.command:data_convert", MACHINE, "Build and convert token stores.")
)
