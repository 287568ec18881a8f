"""Clients with uneven private data: the training samples dealt out by label or topic, from the seed alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

TOPICS_A_CLIENT = 4
"""Text has no labels: stretches of the corpus, so many for each client, stand for topics."""
LABELLED = 1 << 14
"""Labels that are looked at, at the most; of a larger set the clients share so many samples."""


def topics_of(length: int, clients: int, label: Callable[[int], int | None]) -> Ints:
    """The label of each sample that is dealt out: its own where samples have one, else the stretch it lies in."""
    if label(0) is None:
        count = min(length, TOPICS_A_CLIENT * clients)
        return np.arange(length, dtype=np.int64) * count // length
    return np.array([label(i) for i in range(min(length, LABELLED))], dtype=np.int64)


def deal(topics: Ints, clients: int, skew: float, seed: int) -> list[Ints]:
    """The samples of each client: every label is divided by a draw from a Dirichlet distribution (Hsu et al. 2019).

    Every sample goes to one client, and every client has at least one, as long as there are enough.
    """
    random = draw(seed, "shares")
    parts: list[list[Ints]] = [[] for _ in range(clients)]
    for topic in np.unique(topics):
        mine = random.permutation(np.flatnonzero(topics == topic))
        ends = np.cumsum(random.dirichlet(np.full(clients, skew)) * len(mine)).round().astype(np.int64)
        for part, some in zip(parts, np.split(mine, ends[:-1]), strict=True):
            part.append(some)
    dealt = [np.sort(np.concatenate(part)) for part in parts]
    for client, held in enumerate(dealt):
        richest = max(range(clients), key=lambda c: len(dealt[c]))
        if not len(held) and len(dealt[richest]) > 1:
            dealt[client], dealt[richest] = dealt[richest][:1], dealt[richest][1:]
    return dealt


def drawn(clients: int, sampled: int, seed: int, number: int) -> list[int]:
    """Which clients take part in a round."""
    return sorted(int(c) for c in draw(seed, f"round {number}").permutation(clients)[:sampled])


def draw(seed: int, what: str) -> np.random.Generator:
    """Random numbers that belong to a run and a purpose."""
    digest = hashlib.blake2b(f"weft clients {seed} {what}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8").copy()))
