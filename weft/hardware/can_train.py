"""What training needs and planning does not: torch, and a Unix system."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from weft.job.errors import MachineError

UNIX_MODULES = ("fcntl", "pwd", "resource")
"""Modules of the standard library that Windows does not have."""
NO_TORCH = "needs torch, which is not installed: pip install 'torch>=2.11' (weft plan works without it)"
NO_UNIX = "needs Linux or macOS: on Windows, run Weft inside WSL (weft plan works here)"


def check_can_train(what: str) -> None:
    """Raise MachineError on Windows and where torch is absent. `what` begins the sentence."""
    try:
        importlib.import_module("fcntl")
    except ModuleNotFoundError:
        raise MachineError(f"{what} {NO_UNIX}") from None
    if find_spec("torch") is None:
        raise MachineError(f"{what} {NO_TORCH}")


def explain_missing_module(error: ModuleNotFoundError) -> str | None:
    """What to do about a module that Weft could not import; None if it is neither torch nor one of Unix."""
    name = error.name or ""
    if name in UNIX_MODULES:
        return NO_UNIX
    return NO_TORCH if name.partition(".")[0] == "torch" and find_spec("torch") is None else None
