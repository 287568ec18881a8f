"""Privacy accounting of federated averaging with clipping and noise: (epsilon, delta) of the averaged updates."""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from weft.job.errors import MachineError
from weft.job.schema import Job

REQUIRED_PACKAGES = {"noise": "dp_accounting", "secure": "cryptography"}
"""Fields of train.sync that need a package of the extra `privacy`."""


def check_packages(job: Job) -> None:
    """Raise if a setting of train.sync needs a package that is not installed."""
    for field, package in REQUIRED_PACKAGES.items():
        if getattr(job.train.sync, field) and importlib.util.find_spec(package) is None:
            raise MachineError(f"train.sync.{field} needs the package {package}: pip install 'weft[privacy]'")


class PrivacyAccountant:
    """Counts the rounds of each client and returns the privacy loss of the client with the most.

    Each round is a Gaussian mechanism: one client changes the clipped sum by at most `clip`, and the noise on the sum
    has the standard deviation noise · clip. Which clients take part follows from the seed and is written to the
    metrics, so sampling clients does not add privacy, and the loss of a client grows only with its own rounds.
    """

    def __init__(self, noise: float, delta: float, rounds: dict[str, int] | None = None):
        self.noise, self.delta = noise, delta
        self.rounds = Counter({int(c): n for c, n in (rounds or {}).items()})

    def add_round(self, clients: Iterable[int]) -> None:
        self.rounds.update(clients)

    @property
    def epsilon(self) -> float:
        """The epsilon at `delta` for the client that took part most often."""
        return gaussian_epsilon(self.noise, self.delta, max(self.rounds.values(), default=0))

    def state(self) -> dict[str, int]:
        """Rounds by client, for a checkpoint."""
        return {str(c): n for c, n in self.rounds.items()}


def noise_generator(secret: bytes, number: int) -> np.random.Generator:
    """Random numbers for the noise of a round: a repeated round gets the same noise, which only the server can know."""
    digest = hashlib.blake2b(f"weft noise {number}".encode(), key=secret[:64], digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8").copy()))


@lru_cache(maxsize=1)
def gaussian_epsilon(noise: float, delta: float, rounds: int) -> float:
    """The epsilon of so many Gaussian mechanisms with one noise multiplier, by Rényi differential privacy."""
    if not rounds:
        return 0.0
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(noise), rounds)
    return float(accountant.get_epsilon(delta))
