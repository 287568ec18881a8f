"""`weft` and `python -m weft`: the command line, ended by Ctrl-C with code 130 from the first moment."""

import os
import signal

INTERRUPTED = 130


def main() -> None:
    """Import and run the command line. Until a command has something to clean up, Ctrl-C ends the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from weft.cli import main as run

    run()


if __name__ == "__main__":
    main()
