"""The averaged update of a federated round, and the outer step that applies it to the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from numpy.random import Generator
from torch import Tensor

from weft.extensions.server.secure_aggregation import decode, encode
from weft.extensions.server.server_shard import Shard, Tensors
from weft.extensions.server.update_checks import norm
from weft.job.schema import Job
from weft.optim.schedule import learning_rate

FIGURES_SCALE = 2.0**-20
"""Losses and counts are larger than weights; scaled by this they fit the fixed-point range of secure aggregation."""


@dataclass(frozen=True)
class ClientUpdate:
    """A client's result of a round."""

    worker: str
    sent: Tensors
    """A gradient, or the change of the weights and the optimizer state (`optim.…`)."""
    losses: list[float]
    counts: list[float]
    norms: list[float]


@dataclass(frozen=True)
class RoundResult:
    """The mean of a round's updates, and its figures by step."""

    clients: list[int]
    mean: Tensors
    losses: list[float]
    """Summed over the clients, like the counts."""
    counts: list[float]
    norms: list[float]
    """Mean over the clients."""


def client_weights(clients: Iterable[int], examples: Sequence[int], equal: bool) -> dict[int, float]:
    """Each client's weight in the mean: by its examples, or equal, so that noise covers every client alike."""
    sizes = {c: 1 if equal else examples[c] for c in clients}
    return {c: size / max(1, sum(sizes.values())) for c, size in sizes.items()}


def clip_factor(size: float, clip: float) -> float:
    """The factor that reduces an update of this norm to at most `clip`; 0 does not clip."""
    return min(1.0, clip / max(size, 1e-12)) if clip else 1.0


def average(updates: dict[int, ClientUpdate], factors: dict[int, float], steps: int) -> RoundResult:
    """The sum of the updates times their factors."""
    clients = sorted(updates)
    names = updates[clients[0]].sent if clients else ()
    mean = {n: torch.stack([updates[c].sent[n] * factors[c] for c in clients]).sum(0) for n in names}

    def total(what: str) -> list[float]:
        return [sum(getattr(updates[c], what)[i] for c in clients) for i in range(steps)]

    return RoundResult(
        clients, mean, total("losses"), total("counts"), [x / max(1, len(clients)) for x in total("norms")]
    )


def add_noise(tensors: Tensors, deviation: float, random: Generator) -> Tensors:
    """Add Gaussian noise to every value."""
    return {
        n: t + torch.from_numpy(random.normal(0, deviation, tuple(t.shape))).float() for n, t in tensors.items()
    }  # fmt: skip


def pack(update: Tensors, figures: dict[str, list[float]]) -> Tensor:
    """An update and its figures as one vector of fixed-point numbers, for secure aggregation."""
    values = [encode(update[n].reshape(-1)) for n in sorted(update)]
    return torch.cat([*values, *(encode(torch.tensor(figures[k]).double() * FIGURES_SCALE) for k in sorted(figures))])


def packed_length(expected: Tensors, steps: int) -> int:
    return sum(t.numel() for t in expected.values()) + 3 * steps


def unpack(total: Tensor, expected: Tensors, clients: list[int], weight: float, steps: int) -> RoundResult:
    """The result of a round from the sum of the clients' vectors; `weight` is the sum of their weights."""
    sizes = [expected[n].numel() for n in sorted(expected)]
    *parts, counts, losses, norms = (decode(part) for part in total.split([*sizes, steps, steps, steps]))
    mean = {n: (part / weight).float().view(expected[n].shape) for n, part in zip(sorted(expected), parts, strict=True)}
    figures = [(x / FIGURES_SCALE).tolist() for x in (losses, counts, norms / len(clients))]
    return RoundResult(clients, mean, *figures)


class OuterStep:
    """Applies the mean of a round to the weights of a shard, with the outer learning rate and momentum."""

    def __init__(self, job: Job, shard: Shard):
        self.job, self.shard = job, shard
        self.rate, self.momentum = job.train.sync.outer
        if self.momentum:
            shard.extra = {f"outer.velocity.{n}": torch.zeros_like(m.detach()) for n, m in shard.master_params.items()}

    @torch.no_grad()
    def apply(self, mean: Tensors, step: int, steps: int, carries: bool, version: int) -> None:
        """`step` is the first step of the round; `carries` whether the mean contains optimizer state."""
        shard = self.shard
        before = {n: m.detach().clone() for n, m in shard.master_params.items()}
        if steps == 1:
            self._optimizer_step(mean, step, version)
        else:
            self._add(mean, steps, carries)
        with shard.lock:
            for name, master in shard.master_params.items():
                change = before[name] - master.detach()
                if shard.extra:
                    velocity = shard.extra[f"outer.velocity.{name}"].mul_(self.momentum).add_(change)
                    change = change + self.momentum * velocity
                if shard.extra or self.rate != 1:
                    master.detach().copy_(before[name] - self.rate * change)
            shard.version = version

    def _optimizer_step(self, mean: Tensors, step: int, version: int) -> None:
        """The mean gradient is one step of the server's optimizer."""
        clip = self.job.optim.clip
        for name, master in self.shard.master_params.items():
            master.grad = mean[name].to(master.dtype)
        factor = min(1.0, clip / (norm(mean) + 1e-6)) if clip else 1.0
        self.shard.apply(learning_rate(self.job, step + 1), factor, version)

    def _add(self, mean: Tensors, steps: int, carries: bool) -> None:
        """Add the mean change to the weights, and take over the mean optimizer state."""
        with self.shard.lock:
            for name, master in self.shard.master_params.items():
                master.detach().add_(mean[name])
            for name, held in self.shard.optimizers.shards().items() if carries else ():
                if not held.dim():
                    held.add_(steps)  # the step counter
                else:
                    held.copy_(mean[f"optim.{name}"])
                if name.endswith(".exp_avg_sq"):
                    held.clamp_(min=0)  # a second moment is not negative, whatever a client sends
