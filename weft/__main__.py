"""The entry point of `weft` and `python -m weft`: handles signals before anything slow is imported."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line. A stop signal during the imports exits at once with its code: nothing is to be saved."""
    interrupted, preempted = 130, 75  # weft.job.errors.Exit, which would import pydantic
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(interrupted))
    if "train" in sys.argv[1:2]:
        names = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGQUIT")
        for number in (getattr(signal, name) for name in names if hasattr(signal, name)):  # Windows has the first only
            if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, frame: os._exit(preempted))
    from weft.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
