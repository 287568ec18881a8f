"""Python's garbage collector at times of our choosing: a pause in one rank is a pause in all of them."""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

EVERY = 100
"""Steps between collections of what the steps left behind."""


class Collector:
    """Off between steps; what exists when training begins is never looked at again."""

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def tick(self, step: int) -> None:
        if step % EVERY == 0:
            gc.collect(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()
        gc.unfreeze()
