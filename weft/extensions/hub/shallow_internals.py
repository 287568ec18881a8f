"""torch's private names for the children and parameters of a module: a copy that shares all but these."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def shallow_copy(module: nn.Module) -> Any:
    """A copy that shares parameters and children with a module; replacing those of the copy leaves the module."""
    copied = copy.copy(module)
    for name in ("_modules", "_parameters"):
        copied.__dict__[name] = dict(copied.__dict__[name])
    return copied
