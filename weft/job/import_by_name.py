"""Import a module or an object that a job names, with errors that name the job's field."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from weft.job.errors import JobError


def find_object(spec: str, what: str) -> Any:
    """The object behind `package.module:name`; the current folder is searched too. `what` names the field in errors."""
    module_name, _, name = spec.partition(":")
    module = import_module(module_name, f"{what}={spec!r}")
    if not hasattr(module, name):
        raise JobError(f"{what}={spec!r}: {module_name} has no {name!r}")
    return getattr(module, name)


def import_module(name: str, what: str) -> Any:
    """A module by its dotted name, from the current folder too; a JobError that starts with `what` if that fails."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JobError(f"{what}: cannot import {name}: {error}") from error
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may exit
        at = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        raise JobError(f"{what}: importing {name} raised {kind}: {error} ({at.filename}:{at.lineno})") from error
