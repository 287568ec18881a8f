"""The global random generators of torch, NumPy and Python, which transforms of images and texts draw from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def generator_state() -> tuple[bytes, Any, Any]:
    """The states of the three generators; they compare equal if nothing was drawn in between."""
    import torch

    kind, words, *rest = np.random.get_state()
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        (kind, np.asarray(words).tobytes(), *rest),
        random.getstate(),
    )


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Draw the numbers of this key; afterwards the generators are as before.

    No other thread may draw meanwhile.
    """
    import torch

    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    digest = hashlib.blake2b(f"weft sample {key}".encode(), digest_size=24).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(np.frombuffer(digest[8:16], dtype="<u4").astype(np.uint32))
    random.seed(int.from_bytes(digest[16:], "little"))
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
