"""User-facing errors, each with the exit code of the command line, and errors of files in words."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def _limit_remedy() -> str:
    import resource  # absent on Windows, where EFBIG does not occur

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "this file system cannot hold a file of that size; use another one"
    return f"no file may be larger than {limit:,} bytes here; raise the limit with `ulimit -f unlimited`"


REMEDIES: dict[int, Callable[[], str]] = {
    errno.EFBIG: _limit_remedy,
    errno.ENOSPC: lambda: "free some space there",
    getattr(errno, "EDQUOT", -1): lambda: "free some space there, or raise your quota",  # not on Windows
    errno.EROFS: lambda: "use a folder that can be written",
}
"""What to do about errors of the system."""


def describe_file_error(error: OSError) -> str:
    """Which file, what is wrong with it, and what would work where that is known."""
    where = f"{error.filename}: " if error.filename else ""
    remedy = f"; {REMEDIES[error.errno]()}" if error.errno in REMEDIES else ""
    return f"{where}{error.strerror or error}{remedy}"


@contextmanager
def file_named(path: object) -> Iterator[None]:
    """Add the file's path to errors that have none, as those of writes."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
