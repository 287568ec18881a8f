"""A worker: requests tasks from the chief and sends results until the run ends. It may join or leave at any time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.comm.shards import local_of
from weft.data.dataset import Dataset
from weft.data.loader import read_share, to_device
from weft.data.open_dataset import open_dataset
from weft.extensions.server.client_samples import Ints
from weft.extensions.server.rendezvous import chief_address
from weft.extensions.server.secure_aggregation import SecureClient
from weft.extensions.server.server_shard import assign_weights
from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.mesh import Mesh, local_device
from weft.planner.plan import Plan
from weft.planner.sync import one_replica
from weft.training.build import build_state
from weft.training.step import Stepper
from weft.wire.channel import WireError
from weft.wire.secret import run_secret
from weft.wire.tensors import TensorChannel, open_tensor_channel

CHIEF_TIMEOUT_S = 120.0
"""How long a worker or server tries to reach the chief before it fails."""


@dataclass
class Worker:
    """A whole copy of the model, and links to the chief and the servers."""

    run: RunDir
    job: Job
    plan: Plan
    stepper: Stepper
    dataset: Dataset
    name: str
    about: dict[str, Any]
    chief: TensorChannel | None = None
    servers: dict[str, TensorChannel] = field(default_factory=dict)
    version: str | None = None
    """Version of the weights it has."""
    reported_bytes: int = 0
    """Bytes of traffic reported to the chief so far."""
    shares: list[Ints] = field(default_factory=list)
    """The samples of each client, in a federated run."""
    secure: dict[int, SecureClient] = field(default_factory=dict)
    """Keys of the clients that this worker computes for, with secure aggregation."""

    def ask(self, head: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> tuple[dict[str, Any], Any]:
        assert self.chief is not None
        return self.chief.request(head, tensors)

    def connect(self) -> None:
        """Connect to the chief, waiting while it restarts."""
        deadline = time.monotonic() + CHIEF_TIMEOUT_S
        self.disconnect()
        while True:
            try:
                self.chief = self._open(chief_address(self.run))
                self.ask({"role": "worker", "name": self.name, **self.about})
                return
            except (OSError, KeyError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise MachineError(f"{self.name} cannot reach the server of {self.run.path}: {error}") from None
                time.sleep(0.05)

    def _open(self, address: str) -> TensorChannel:
        return open_tensor_channel(address, run_secret(self.run.path), self.job.comm.encrypt)

    def traffic(self) -> int:
        """Bytes sent and received since the last call."""
        links = [*self.servers.values(), *([self.chief] if self.chief else [])]
        before, self.reported_bytes = self.reported_bytes, sum(link.sent + link.received for link in links)
        return max(0, self.reported_bytes - before)

    def disconnect(self) -> None:
        for link in self.servers.values():
            link.close()
        if self.chief is not None:
            self.chief.close()
        self.chief, self.servers, self.version, self.reported_bytes = None, {}, None, 0

    def server(self, address: str) -> TensorChannel:
        """The link to a server; an empty address is the chief, which holds the first shard."""
        assert self.chief is not None
        if not address:
            return self.chief
        if address not in self.servers:
            link = self._open(address)
            link.request({"role": "worker", "name": self.name})
            self.servers[address] = link
        return self.servers[address]

    def pull(self, addresses: list[str], version: str) -> None:
        """Load the servers' weights, unless this version is already loaded."""
        if version == self.version:
            return
        for address in addresses:
            _, tensors = self.server(address).request({"do": "read", "what": "weights"})
            self.load_weights(tensors)
        self.version = version

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Copy weights, by checkpoint name, into the model."""
        master_params = self.stepper.state.model.master_params
        for name, tensor in tensors.items():
            local_of(master_params[name.removeprefix("model.")].detach()).copy_(tensor)
        self.stepper.state.model.refresh()

    def push(self, addresses: list[str], key: str, grads: dict[str, Tensor]) -> None:
        """Send each server the gradients of the weights that it holds."""
        for address, names in zip(addresses, self.assignment(len(addresses)), strict=True):
            self.server(address).request({"do": "stage", "key": key}, {n: grads[n] for n in names})

    def assignment(self, servers: int) -> list[list[str]]:
        return assign_weights({n: m.numel() for n, m in self.stepper.state.model.master_params.items()}, servers)


def compute_share(worker: Worker, task: dict[str, Any]) -> None:
    """Compute one share of a step: pull weights, push gradients to every server, then report to the chief."""
    worker.pull(task["servers"], task["version"])
    job, stepper = worker.job, worker.stepper
    batches = [
        to_device(b, stepper.mesh.device)
        for b in read_share(
            worker.dataset, seed=job.train.seed, step=task["step"], global_batch=job.train.global_batch,
            microbatch=worker.plan.microbatch, dp_rank=task["share"], dp_size=worker.plan.dp, offset=task["offset"],
        )
    ]  # fmt: skip
    grads = stepper.gradients(batches)
    grad_params = stepper.state.model.grad_params
    sums = {
        n: local_of(x.grad).float() * (grads.nominal / grads.scale)
        for n, x in grad_params.items()
        if x.grad is not None
    }
    try:
        worker.push(task["servers"], task["key"], sums)
    except WireError:
        worker.servers, worker.version = {}, None
        worker.ask({"do": "back", "key": task["key"]})  # also raises if the chief was lost
        return
    figures = {"loss": float(grads.loss), "count": float(grads.count), "bytes": worker.traffic()}
    worker.ask({"do": "done", "key": task["key"], **figures})


def make_worker(run: RunDir, job: Job, plan: Plan, name: str, about: dict[str, Any]) -> Worker:
    """Build the whole model in this process."""
    one = one_replica(plan)
    mesh = Mesh(0, 1, local_device(plan, int(os.environ.get("LOCAL_RANK", 0))), None, {}, None, None, None)
    state = build_state(job, one, mesh)
    return Worker(run, job, plan, Stepper(job, one, mesh, state), open_dataset(job), name, about)


def run_tasks(worker: Worker, does: Callable[[Worker, dict[str, Any]], None]) -> None:
    """Process tasks until the chief has none left."""
    worker.connect()
    while True:
        try:
            task, tensors = worker.ask({"do": "next"})
            if task.get("stop"):
                return
            does(worker, {**task, "tensors": tensors})
        except WireError:
            worker.connect()
