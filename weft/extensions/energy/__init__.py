"""Energy and health of devices: joules, CO2 and cost of a run, power caps, and warnings of failing GPUs.

Registers the meter of devices and the command `weft bench power`.
"""

from weft.cli.commands import COMMANDS, MACHINE, Command
from weft.watch.device_meters import DEVICE_METERS, DeviceMeterKind

PACKAGE = __name__

DEVICE_METERS.register(
    DeviceMeterKind("energy", f"{PACKAGE}.run_energy:open_energy", f"{PACKAGE}.power_cap:restore_limits")
)
COMMANDS.register(
    Command("bench power", f"{PACKAGE}.command:bench_power", MACHINE, "Measure this machine.", trains=True)
)
