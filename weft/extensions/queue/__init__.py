"""One machine shared by several users: runs claim GPUs, cores and memory, and wait for their turn.

Registers the command `weft queue`, and the claim of a run with the machine that it starts on.
"""

from weft.cli.commands import COMMANDS, MACHINE, Command
from weft.launch.claims import CLAIMS, ClaimKind

COMMANDS.register(Command("queue", "weft.extensions.queue.command:queue", MACHINE))
COMMANDS.register(Command("queue init", "weft.extensions.queue.command:queue_init", MACHINE))
COMMANDS.register(Command("queue run", "weft.extensions.queue.command:queue_run", MACHINE))
COMMANDS.register(Command("queue release", "weft.extensions.queue.command:queue_release", MACHINE))
CLAIMS.register(
    ClaimKind(
        "queue",
        hold="weft.extensions.queue.run_claim:claimed_for_run",
        listed="weft.extensions.queue.listing:claims_of_runs",
        trials="weft.extensions.queue.packed_trials:packed_trials",
    )
)
