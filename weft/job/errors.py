"""Errors a person can act on; each class carries the exit code of the command-line contract."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, as the command line promises them."""

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
    """Something a person can mend: the text is one clear sentence, shown without a traceback."""

    exit_code: Exit = Exit.DIFFERS


class JobError(WeftError):
    """The job is wrong: a key, a type, a value, or two settings that clash."""

    exit_code = Exit.JOB


class FitError(WeftError):
    """The job is right but will not fit on the devices it names."""

    exit_code = Exit.FIT


class MachineError(WeftError):
    """This machine lacks something the job needs."""

    exit_code = Exit.MACHINE


class DivergedError(WeftError):
    """The loss or the gradients are no longer finite."""

    exit_code = Exit.DIVERGED


class HangError(WeftError):
    """A collective ran out of time: some rank never arrived."""

    exit_code = Exit.HANG
