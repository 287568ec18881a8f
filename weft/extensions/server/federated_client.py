"""A federated client's part of a round: train on its own samples, starting from the server's weights.

In a round of one step the client sends a gradient, and the mean of all gradients is one step of the server's optimizer,
as in ordinary training. In a longer round the client runs the steps itself and sends the change of its weights and its
optimizer state; the server averages both.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.comm.shards import local_of
from weft.data.dataset import Dataset
from weft.data.loader import Batch, read_samples, to_device
from weft.data.sample_order import BatchShares, sample_index
from weft.extensions.server.client_samples import Ints, sample_labels, split_by_label
from weft.extensions.server.federated_update import add_noise, clip_factor, pack
from weft.extensions.server.privacy import noise_generator
from weft.extensions.server.secure_aggregation import SecureClient
from weft.extensions.server.update_checks import norm
from weft.extensions.server.worker import Worker
from weft.job.schema import Job
from weft.optim.build_optimizers import Optimizers
from weft.optim.schedule import learning_rate
from weft.training.build import make_optimizers, units_of
from weft.training.step import Gradients


def label_of(dataset: Dataset) -> Callable[[int], int | None]:
    """Return a function that gives the class of a training sample, or None if it has none."""

    def label(index: int) -> int | None:
        targets = np.asarray(dataset.train(index).get("targets", 0.0))
        return int(targets) if targets.ndim == 0 and np.issubdtype(targets.dtype, np.integer) else None

    return label


def client_shares(job: Job, dataset: Dataset) -> list[Ints]:
    """The samples of each client."""
    sync = job.train.sync
    topics = sample_labels(dataset.train_len, sync.clients, label_of(dataset))
    return split_by_label(topics, sync.clients, sync.skew, job.train.seed)


def client_batches(worker: Worker, client: int, step: int) -> list[Batch]:
    """The microbatches of a client's step: the next of its own samples, in its own order."""
    job, own = worker.job, worker.shares[client]
    size = job.train.global_batch // job.train.sync.drawn
    ids = np.arange(step * size, (step + 1) * size, dtype=np.int64)
    indices = own[sample_index(job.train.seed + 1 + client, ids, len(own))]
    parts = BatchShares.even(size, worker.plan.microbatch, 1).slices(0)
    return read_samples(worker.dataset, ids + (client << 40), indices, parts, len(own))


def train_client(worker: Worker, task: dict[str, Any]) -> None:
    """Run one client's part of a round, or of one phase with secure aggregation, and send the result."""
    head, tensors = _PHASES[task["phase"]](worker, task) if "phase" in task else _update(worker, task)
    worker.ask({"do": "done", "key": task["key"], **head, "bytes": worker.traffic()}, tensors)


def _update(worker: Worker, task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The client's losses, counts and norms by step, and its gradient or change."""
    if not worker.shares:
        worker.shares = client_shares(worker.job, worker.dataset)
    worker.pull(task["servers"], task["version"])
    figures: dict[str, list[float]] = {"losses": [], "counts": [], "norms": []}
    return figures, (_one_step if task["steps"] == 1 else _several)(worker, task, figures)


def _publish_keys(worker: Worker, task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    # the threshold is the client's own: the server cannot ask for masks to be removed with fewer clients
    client = worker.secure[task["client"]] = SecureClient(task["client"], worker.job.train.sync.quorum)
    return {"keys": [key.hex() for key in client.public_keys()]}, {}


def _share_keys(worker: Worker, task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    keys = {int(c): (bytes.fromhex(a), bytes.fromhex(b)) for c, (a, b) in task["keys"].items()}
    sealed = worker.secure[task["client"]].make_shares(keys)
    return {"sealed": {str(c): data.hex() for c, data in sealed.items()}}, {}


def _masked_update(worker: Worker, task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The clipped update times the client's weight, with the client's share of the noise, masked."""
    client, sync = worker.secure[task["client"]], worker.job.train.sync
    client.receive_shares({int(c): bytes.fromhex(data) for c, data in task["sealed"].items()})
    figures, sent = _update(worker, task)
    weight = 1 / sync.drawn if sync.noise else task["weight"]
    factor = weight * clip_factor(norm(sent), sync.clip)
    update = {n: t.cpu().float() * factor for n, t in sent.items()}
    if sync.noise:  # the sum over at least a quorum of clients has the whole noise
        random = noise_generator(secrets.token_bytes(32), task["round"])
        update = add_noise(update, sync.noise * sync.clip * weight / math.sqrt(sync.quorum), random)
    return {}, {"vector": client.mask(pack(update, figures))}


def _reveal_shares(worker: Worker, task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    revealed = worker.secure[task["client"]].reveal(task["survivors"])
    return {"shares": {str(c): [kind, hex(share)] for c, (kind, share) in revealed.items()}}, {}


_PHASES = {"keys": _publish_keys, "shares": _share_keys, "train": _masked_update, "unmask": _reveal_shares}
"""What a client does in each phase of a round with secure aggregation."""


def _gradients(worker: Worker, task: dict[str, Any], step: int, figures: dict[str, list[float]]) -> Gradients:
    batches = client_batches(worker, task["client"], step)
    grads = worker.stepper.gradients([to_device(b, worker.stepper.mesh.device) for b in batches])
    figures["losses"].append(float(grads.loss))
    figures["counts"].append(float(grads.count))
    return grads


def _one_step(worker: Worker, task: dict[str, Any], figures: dict[str, list[float]]) -> dict[str, Tensor]:
    """The gradient of the mean loss."""
    grads = _gradients(worker, task, task["step"], figures)
    grad_params = worker.stepper.state.model.grad_params
    mean = {n: local_of(x.grad).float() * grads.factor for n, x in grad_params.items() if x.grad is not None}
    figures["norms"].append(norm(mean))
    return mean


def _several(worker: Worker, task: dict[str, Any], figures: dict[str, list[float]]) -> dict[str, Tensor]:
    """The change of the weights and, if the round carries it, the optimizer state."""
    job, stepper, carries, parts = worker.job, worker.stepper, task["carries"], task["parts"]
    spread_model, optim = stepper.state.model, job.optim
    worker.version = None  # the weights are about to change
    before = {n: local_of(m.detach()).clone() for n, m in spread_model.master_params.items()}
    optimizers = stepper.state.optimizers = make_optimizers(job, spread_model, stepper.mesh, units_of(job))
    if carries:
        _begin_from(optimizers, worker.server("").request({"do": "read", "what": "all"})[1])
    # the clipping threshold is set for the mean over all clients, whose noise is smaller by sqrt(parts)
    stepper.job = job.model_copy(update={"optim": optim.model_copy(update={"clip": optim.clip * math.sqrt(parts)})})
    for step in range(task["step"], task["step"] + task["steps"]):
        grads = _gradients(worker, task, step, figures)
        old = _moments(optimizers, "exp_avg") if carries else {}
        norm, _ = stepper.update(grads, learning_rate(job, step + 1))
        _as_of_all(optimizers, old, optim.betas, parts)
        figures["norms"].append(float(norm))
    stepper.job = job
    sent = {n: local_of(m.detach()) - before[n] for n, m in spread_model.master_params.items()}
    state = optimizers.shards() if carries else {}
    return sent | {f"optim.{n}": t.float() for n, t in state.items() if t.dim()}


@torch.no_grad()
def _begin_from(optimizers: Optimizers, tensors: dict[str, Tensor]) -> None:
    optimizers.allocate()
    for name, held in optimizers.shards().items():
        held.copy_(tensors[f"optim.{name}"])


def _moments(optimizers: Optimizers, kind: str) -> dict[str, Tensor]:
    """Copies of one kind of optimizer state, by weight."""
    held = optimizers.shards().items()
    return {n.removesuffix(f".{kind}"): t.clone() for n, t in held if n.endswith(f".{kind}")}


@torch.no_grad()
def _as_of_all(optimizers: Optimizers, old: dict[str, Tensor], betas: tuple[float, float], parts: float) -> None:
    """Correct Adam's second moment for the mean over all clients.

    One client's gradient is mostly noise; in the mean over `parts` clients the variance of that noise is `parts` times
    smaller. Without the correction the second moment is too large and every client's steps are too short.
    """
    held = optimizers.shards()
    for name, before in old.items():
        first, second = held[f"{name}.exp_avg"], held[f"{name}.exp_avg_sq"]
        gradient = (first - betas[0] * before) / (1 - betas[0])
        mean = first / (1 - betas[0] ** held[f"{name}.step"])
        second.add_(mean.square() - gradient.square(), alpha=(1 - betas[1]) * (1 - 1 / parts)).clamp_(min=0)
