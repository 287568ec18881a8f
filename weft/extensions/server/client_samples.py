"""Split the training samples among federated clients, unevenly by label or topic, as a function of the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

TOPICS_A_CLIENT = 4
"""Text has no labels: equal stretches of the corpus, this many for each client, count as topics."""
MAX_LABELLED = 1 << 14
"""Number of labelled samples to split; of a larger dataset only the first ones are used."""


def sample_labels(length: int, clients: int, label: Callable[[int], int | None]) -> Ints:
    """Label of each sample: its own label if it has one, else the number of its stretch of the corpus."""
    if label(0) is None:
        count = min(length, TOPICS_A_CLIENT * clients)
        return np.arange(length, dtype=np.int64) * count // length
    return np.array([label(i) for i in range(min(length, MAX_LABELLED))], dtype=np.int64)


def split_by_label(topics: Ints, clients: int, skew: float, seed: int) -> list[Ints]:
    """Sample indices of each client: every label is split by a draw from a Dirichlet distribution (Hsu et al. 2019).

    Every sample belongs to exactly one client; every client gets at least one if there are enough.
    """
    random = random_generator(seed, "shares")
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


def sample_clients(clients: int, sampled: int, seed: int, number: int) -> list[int]:
    """The clients that take part in a round."""
    return sorted(int(c) for c in random_generator(seed, f"round {number}").permutation(clients)[:sampled])


def random_generator(seed: int, what: str) -> np.random.Generator:
    """Random generator for one purpose of a run."""
    digest = hashlib.blake2b(f"weft clients {seed} {what}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8").copy()))
