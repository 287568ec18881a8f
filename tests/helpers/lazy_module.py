"""Large libraries are imported by the tests that use them, and not by every worker that collects the tests."""

from importlib import import_module
from typing import Any


class LazyModule:
    """A module that is imported when one of its public attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every object of a test file for such names
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
