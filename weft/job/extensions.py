"""Where entries come from besides the core: the folders of `weft.extensions`, installed packages of the entry-point
group `weft.extensions`, and the modules that a job names in `extensions:`."""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from weft.job.errors import MachineError
from weft.job.import_by_name import import_module

PACKAGE = GROUP = "weft.extensions"
MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@cache
def load_extensions() -> None:
    """Import every extension once. Registries call this when a name is not the core's, or when they list all names."""
    for name in folder_names():
        importlib.import_module(f"{PACKAGE}.{name}")
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else entry.value
            raise MachineError(
                f"the extension {entry.name} of the package {package} cannot be imported "
                f"({type(error).__name__}: {error}); pip uninstall {package} would work"
            ) from error


def folder_names() -> list[str]:
    """The names of the extensions that Weft ships: folders of `weft/extensions`."""
    spec = importlib.util.find_spec(PACKAGE)
    roots = spec.submodule_search_locations if spec is not None else None
    return sorted({path.parent.name for root in roots or () for path in Path(root).glob("*/__init__.py")})


def import_extensions(names: Any) -> None:
    """Import the modules of a job's `extensions`, which register entries. Only for jobs that the user gave: names in a
    checkpoint are never imported."""
    for name in names if isinstance(names, list | tuple) else ():
        if isinstance(name, str) and MODULE_NAME.fullmatch(name):
            import_module(name, f"extensions: {name}")
