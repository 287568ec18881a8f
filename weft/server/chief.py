"""The first server of a run: it starts the desk, evaluates, saves, and writes the run's files, as rank 0 elsewhere."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.checkpoint.checkpointer import Checkpoints
from weft.data.dataset import open_dataset
from weft.data.loader import Batch, to_device, val_batches
from weft.job.errors import DivergedError, Exit, JobError, MachineError
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.mesh import Mesh, local_device
from weft.models.build import build_model
from weft.optim.build import Optimizers, build_optimizers
from weft.parallel.apply import find_units
from weft.planner.plan import Plan
from weft.planner.sync import inside
from weft.server.connections import Desk, Hub
from weft.server.federated_client import client_shares
from weft.server.federated_rounds import Averaging
from weft.server.records import Book, Copy
from weft.server.rendezvous import folder, say_address
from weft.server.shard import Remote, Shard, deal_out
from weft.server.updates import Updates
from weft.training.build import build_state
from weft.training.metrics import peak_memory_gib
from weft.training.signals import Signals
from weft.training.state import State
from weft.training.step import Stepper
from weft.watch import logs
from weft.watch.journal import Journal
from weft.watch.progress import Progress
from weft.wire.secret import run_secret
from weft.wire.tensors import connect

TICK_S = 0.1
LEAVE_S = 10.0
"""How long workers may take to hear that the run is over."""


class Lead(Desk, Protocol):
    """The desk of a kind of run, as the chief sees it."""

    stop: bool
    failed: str | None

    @property
    def ended(self) -> bool: ...

    @property
    def step(self) -> int: ...

    def whole(self) -> bool: ...

    def begin(self, tensors: dict[str, Tensor], sync: dict[str, Any]) -> None: ...

    def resume(self) -> bool: ...

    def tick(self) -> None: ...

    def halt(self) -> None: ...

    def copy(self, evaluates: bool, saves: bool) -> Copy: ...


def whole_masters(job: Job, plan: Plan) -> tuple[State, Mesh]:
    """A whole copy of the model in this process."""
    mesh = Mesh(0, 1, local_device(plan, 0), None, {}, None, None, None)
    state = build_state(job, inside(plan), mesh)
    if learned := [n for n, b in state.woven.buffers().items() if b.is_floating_point()]:
        raise JobError(
            f"train.sync={plan.sync} carries weights, and the model also learns the buffer {learned[0]}; "
            "train.sync=step would work"
        )
    return state, mesh


def make_shard(run: RunDir, job: Job, state: State, index: int) -> Shard:
    """The weights that server `index` holds."""
    masters, servers = state.woven.masters, job.train.sync.servers
    names = deal_out({n: m.numel() for n, m in masters.items()}, servers)[index]
    units = tuple(find_units(build_model(job.model)))

    def make(held: dict[str, Tensor]) -> Optimizers:
        return build_optimizers(job.optim, held, lambda name: name.startswith(units))

    held: dict[str, Tensor] = {n: nn.Parameter(masters[n].detach().cpu().clone()) for n in names}
    return Shard(held, make, folder(run), f"shard-{index}-of-{servers}")


def reach_shard(address: str, secret: bytes) -> Remote:
    """The chief's own link to another server."""
    link = connect(address, secret)
    link.request({"role": "chief", "name": "chief"})
    return Remote(link)


@dataclass
class Chief:
    """What the main thread does while the desk serves."""

    run: RunDir
    job: Job
    plan: Plan
    state: State
    stepper: Stepper
    checkpoints: Checkpoints
    book: Book
    held_out: list[list[Batch]]
    log: logging.Logger

    @torch.no_grad()
    def evaluate(self, copy: Copy) -> None:
        masters = self.state.woven.masters
        for name, tensor in copy.weights.items():
            if name.startswith("model."):
                masters[name.removeprefix("model.")].detach().copy_(tensor)
        self.state.woven.refresh()
        val = self.stepper.evaluate(self.held_out)
        self.book.event("eval", f"step {copy.step}: validation loss {val:.4f}", step=copy.step, val_loss=val)

    def save(self, copy: Copy) -> None:
        """An ordinary checkpoint, as one rank would write it."""
        state = self.state
        state.step, state.tokens = copy.step, copy.tokens
        state.samples = copy.sync.get("offset", 0) + copy.step * self.job.train.global_batch
        rest = {n: t for n, t in state.tensors().items() if not n.startswith("optim.") and n not in copy.weights}
        meta = {**state.meta(self.job, inside(self.plan)), "sync": copy.sync}
        self.checkpoints.save(copy.step, {**rest, **copy.weights}, meta)

    def handle(self, copy: Copy) -> None:
        if copy.evaluates and self.held_out:
            self.evaluate(copy)
        if copy.saves:
            self.save(copy)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The newest checkpoint's tensors, and what its desk knew; nothing at the beginning."""
        if self.checkpoints.newest() is None:
            return {}, {}
        tensors = self.state.empty_like(saved_world=0)
        found = self.checkpoints.load_newest(tensors)
        if found is None:
            return {}, {}
        self.state.adopt(tensors, found.meta)
        if found.meta.get("sync", {}).get("velocity"):
            masters = self.state.woven.masters
            outer = {f"outer.velocity.{n}": torch.empty_like(m.detach()) for n, m in masters.items()}
            self.checkpoints.load(found, outer)
            tensors |= outer
        before = Plan.from_json(found.meta["plan"])
        self.book.event("resume", step=self.state.step, path=str(found.path), layout=self.plan.layout(),
                        was=before.layout())  # fmt: skip
        self.log.info("%s", f"resumed from step {self.state.step}, {found.path}")
        return tensors, found.meta.get("sync", {})


def lead(run: RunDir, job: Job, plan: Plan, signals: Signals) -> Exit:
    """Be the chief until the run is over."""
    began = time.perf_counter()
    log = logs.setup(run, 0, "server 0", plan.world)
    state, mesh = whole_masters(job, plan)
    journal = Journal(run)
    c, dataset = job.checkpoint, open_dataset(job)

    def on_event(kind: str, **fields: Any) -> None:
        if kind in ("damaged", "checkpoint_failed"):
            log.warning("%s", f"checkpoint {fields['path']}: {fields['why']}")
        journal.event("checkpoint" if kind == "checkpoint_saved" else kind, **fields)

    checkpoints = Checkpoints(run.checkpoints, group=None, keep=c.keep, keep_every=c.keep_every,
                              background=c.background, on_event=on_event)  # fmt: skip
    held_out = [
        [to_device(b, mesh.device) for b in batches]
        for batches in val_batches(dataset, global_batch=job.train.global_batch, microbatch=plan.microbatch, dp_rank=0,
                                   dp_size=1, limit=job.train.eval_batches)
    ] if job.train.eval_every else []  # fmt: skip
    with Progress(job.train.steps, 0, job.watch.every) as progress:
        book = Book(job, plan, journal, progress, log)
        chief = Chief(run, job, plan, state, Stepper(job, inside(plan), mesh, state), checkpoints, book, held_out, log)
        tensors, sync = chief.load()
        secret = run_secret(run.path)
        shard = make_shard(run, job, state, 0)
        desk: Lead = (
            Updates(job, plan.dp, shard, book, lambda a: reach_shard(a, secret))
            if plan.sync == "server"
            else Averaging(job, [len(s) for s in client_shares(job, dataset)], shard, book)
        )
        hub = Hub(job.train.sync.host, secret, desk, log)
        say_address(run, hub.address)
        first = state.step
        stopped = _wait(desk.whole, signals)
        if not stopped:
            first = _start(desk, chief, tensors, sync)
            progress.start = first
            log.info("%s", f"{plan.layout()} on {plan.device}, ready after {time.perf_counter() - began:.1f} s")
            book.event("start", step=first, layout=plan.layout(), world=plan.world)
            book.began = time.perf_counter()
            stopped = _serve(desk, chief, signals)
        checkpoints.wait()
        desk.halt()
        _farewell(hub)
        if desk.failed:
            book.event("diverged", step=desk.step, why=desk.failed)
            raise DivergedError(f"{desk.failed}; try a lower optim.lr (now {job.optim.lr:g}) or a longer optim.warmup")
        if desk.step > first and checkpoints.durable != desk.step:
            raise MachineError(
                f"step {desk.step} was reached, but its checkpoint could not be written; see events.jsonl"
            )
    summary = {
        "step": desk.step, "steps_done": desk.step - first, "seconds": time.perf_counter() - began,
        "loss": book.last.get("loss"), "predicted": plan.predicted,
        "measured": {"memory_gib": peak_memory_gib(mesh.device), "step_time_s": book.last.get("step_time_s")},
    }  # fmt: skip
    stopped = stopped if desk.step < job.train.steps else None
    journal.event("stop" if stopped else "done", **summary, **({"code": int(stopped)} if stopped else {}))
    for snapshot in folder(run).glob("*.safetensors"):  # the checkpoint has it all
        snapshot.unlink(missing_ok=True)
    return stopped or Exit.DONE


def _start(desk: Lead, chief: Chief, tensors: dict[str, Tensor], sync: dict[str, Any]) -> int:
    """From the servers' snapshots, where those are newer than the newest checkpoint: a server was killed."""
    step = chief.state.step
    if not (desk.resume() and desk.step > step):
        offset = chief.state.samples - step * chief.job.train.global_batch
        desk.begin(tensors, {"step": step, "tokens": chief.state.tokens, "offset": offset, **sync})
    if desk.step == 0:
        chief.handle(desk.copy(evaluates=True, saves=False))
    return desk.step


def _wish(signals: Signals) -> Exit | None:
    return Signals.decide(signals.flags())


def _wait(what: Callable[[], bool], signals: Signals) -> Exit | None:
    while not what():
        if wish := _wish(signals):
            return wish
        time.sleep(TICK_S / 4)
    return None


def _serve(desk: Lead, chief: Chief, signals: Signals) -> Exit | None:
    """Evaluate and save what the desk leaves to us, until the run has ended or someone wants it to."""
    copies, first = chief.book.copies, desk.step
    while not (desk.ended and copies.empty()):
        try:
            chief.handle(copies.get_nowait())
        except queue.Empty:
            desk.tick()
            time.sleep(TICK_S / 4)  # not get(timeout=…): in CPython 3.11 a signal at its end lets it wait for ever
        if wish := _wish(signals):
            desk.halt()
            if desk.step > first:
                chief.save(desk.copy(evaluates=False, saves=True))
            return wish
    return None


def _farewell(hub: Hub) -> None:
    """Let every worker hear that there is nothing left to do."""
    deadline = time.monotonic() + LEAVE_S
    while any(p.role == "worker" for p in hub.peers) and time.monotonic() < deadline:
        time.sleep(TICK_S / 4)
    hub.close()
