"""Python's garbage collector at chosen times: a pause in one rank delays all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

COLLECT_EVERY_STEPS = 100


class GarbageCollection:
    """Off between steps; objects that exist when training starts are not scanned again, being in the oldest generation.

    They are not frozen: gc.unfreeze() after training would include all imported modules, and a rank that joins the next
    attempt would scan half a million objects first.
    """

    def __enter__(self) -> Self:
        gc.collect()
        gc.disable()
        return self

    def after_step(self, step: int) -> None:
        if step % COLLECT_EVERY_STEPS == 0:
            gc.collect(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()


@contextmanager
def no_collection() -> Iterator[None]:
    """Import inside it: importing torch is a fifth faster, and what was imported is not scanned again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
