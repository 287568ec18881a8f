"""User-facing errors, each with the exit code of the command line."""

from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of the command line."""

    DONE = 0
    DIFFERS = 1
    JOB = 2
    FIT = 3
    MACHINE = 4
    HANG = 5
    DIVERGED = 6
    PREEMPTED = 75
    INTERRUPTED = 130


class WeftError(Exception):
    """An error that the user can fix. Its text is shown without a traceback."""

    exit_code: Exit = Exit.DIFFERS


class JobError(WeftError):
    """The job is invalid: an unknown key, a wrong type or value, or two settings that clash."""

    exit_code = Exit.JOB


class FitError(WeftError):
    """The job does not fit into the memory of its devices."""

    exit_code = Exit.FIT


class MachineError(WeftError):
    """This machine lacks something that the job needs."""

    exit_code = Exit.MACHINE


class DivergedError(WeftError):
    """The loss or the gradients are not finite."""

    exit_code = Exit.DIVERGED


class HangError(WeftError):
    """A collective timed out because a rank did not arrive."""

    exit_code = Exit.HANG


def check_output_file(path: Path, what: str, example: str) -> None:
    """Refuse to replace a device, a folder or anything else that is not a regular file."""
    if path.exists() and not path.is_file():
        raise JobError(f"{what} {path} exists and is not a regular file; name a new file such as {example}")
