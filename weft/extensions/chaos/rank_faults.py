"""Faults injected inside a rank, as ordered by `weft chaos` through WEFT_FAULTS."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from weft.comm.shards import local_of
from weft.extensions.chaos.faults import hold_path
from weft.parallel.spread_model import Batch
from weft.training.step import Gradients, Stepper

if TYPE_CHECKING:
    from weft.training.session import Session

VARIABLE = "WEFT_FAULTS"
"""Names the orders file: a JSON list, replaced atomically. Markers of injected faults are next to it."""

HOLD_POLL_S = 0.005

Order = dict[str, Any]


def arm(session: Session) -> None:
    """Add ordered faults to this session, if WEFT_FAULTS is set."""
    if path := os.environ.get(VARIABLE):
        session.stepper = FaultyStepper.of(session.stepper, Orders(Path(path), session.mesh.rank))


class Orders:
    """The orders of this rank, read before each step."""

    def __init__(self, path: Path, rank: int):
        self.path, self.rank = path, rank
        self.seen: tuple[int, int] | None = None
        self.known: list[Order] = []

    def look(self) -> None:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return
        now = (found.st_ino, found.st_mtime_ns)
        if now != self.seen:
            self.known = [o for o in json.loads(self.path.read_text()) if o["rank"] in (None, self.rank)]
            self.seen = now

    def may_start(self, step: int) -> bool:
        """Whether a step may start: not if the fault injector, which is late, must act before it."""
        try:
            return step <= int(hold_path(self.path).read_text())
        except (OSError, ValueError):
            return True

    def due(self, step: int, phase: str, kinds: tuple[str, ...]) -> list[Order]:
        """Orders that are due: of this phase and of this or an earlier step."""
        return [o for o in self.known if o["step"] <= step and o["phase"] == phase and o["kind"] in kinds]

    def first_time(self, order: Order, step: int) -> bool:
        """Write the marker; False if this order was already executed on this rank, perhaps by another process."""
        marker = marker_of(self.path, order["id"], self.rank)
        try:
            handle = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps({"time": time.time(), "step": step, "phase": order["phase"]}))
        return True


def marker_of(path: Path, number: int, rank: int) -> Path:
    """The marker file of an order on a rank."""
    return path.with_name(f"{path.stem}-{number}-rank-{rank}.injected")


@dataclass
class FaultyStepper(Stepper):
    """A stepper that injects faults."""

    orders: Orders | None = None

    @classmethod
    def of(cls, stepper: Stepper, orders: Orders) -> Self:
        return cls(**{f.name: getattr(stepper, f.name) for f in fields(stepper)}, orders=orders)

    def learning_rate(self) -> float:
        """Called at the start of each step, before its data are read."""
        assert self.orders is not None
        while not self.orders.may_start(self.state.step + 1):
            time.sleep(HOLD_POLL_S)
        self.orders.look()
        self._inject("data")
        return super().learning_rate()

    def gradients(self, batches: list[Batch]) -> Gradients:
        assert self.orders is not None
        self._inject("forward")
        step = self.state.step + 1
        for order in self.orders.due(step, "forward", ("spike",)):
            if order["step"] == step:  # this batch is poisoned whenever it is read
                self.orders.first_time(order, step)
                batches = [poison(b, self.job.model.vocab) for b in batches]
        orders = self.orders.due(step, "backward", ("nan", *ACTIONS))
        if not orders:
            return super().gradients(batches)

        def change(gradient: Tensor) -> Tensor:
            self._inject("backward")
            nan = [o for o in orders if o["kind"] == "nan" and self.orders and self.orders.first_time(o, step)]
            return gradient * float("nan") if nan else gradient

        with in_backward(modules_of(self.state.model), change):
            return super().gradients(batches)

    def update(self, grads: Gradients, lr: float) -> Any:
        assert self.orders is not None
        self._inject("update")
        done = super().update(grads, lr)
        for order in self.orders.due(self.state.step, "update", ("bitflip",)):
            if self.orders.first_time(order, self.state.step):
                flip_bit(self.state.model.master_params, order["moment"])
                self.state.model.refresh()
        return done

    def _inject(self, phase: str) -> None:
        assert self.orders is not None
        step = self.state.step + 1
        for order in self.orders.due(step, phase, tuple(ACTIONS)):
            if self.orders.first_time(order, step):
                ACTIONS[order["kind"]](self.mesh.device)


def sleep_forever(device: torch.device) -> None:
    time.sleep(3600)


def hold_gil(device: torch.device) -> None:
    """Deadlock inside C while holding the GIL; only SIGKILL ends it."""
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def run_out_of_memory(device: torch.device) -> None:
    """Allocate more than any machine has, to get the allocator's own error."""
    torch.empty(1 << 48, dtype=torch.uint8, device=device)


def access_illegal_memory(device: torch.device) -> None:
    """A kernel reads far out of bounds, after which every CUDA call of the process fails; on a CPU, SIGSEGV."""
    if device.type == "cuda":
        torch.zeros(1, device=device)[torch.full((1,), 1 << 40, device=device)]
        torch.cuda.synchronize(device)
    ctypes.string_at(0)


ACTIONS: dict[str, Callable[[torch.device], None]] = {
    "sleep": sleep_forever,
    "gil": hold_gil,
    "oom": run_out_of_memory,
    "illegal": access_illegal_memory,
}


def poison(batch: Batch, vocab: int | None) -> Batch:
    """The batch with unpredictable targets, the same on every rank that reads these samples."""
    targets = batch["targets"]
    if targets.is_floating_point():
        wrong = targets * 1000
    elif vocab and targets.dim() > 1:
        wrong = torch.full_like(targets, vocab - 1)  # a rare token in most vocabularies
    else:
        wrong = targets.roll(1, 0)
    return {**batch, "targets": wrong}


def flip_bit(weights: dict[str, Tensor], moment: float) -> None:
    """Flip the highest mantissa bit of one weight: a visible change without a non-finite value."""
    held = sorted((n, local_of(t)) for n, t in weights.items())
    sizes = [t.numel() for _, t in held]
    at = int(moment * sum(sizes))
    for (_, tensor), size in zip(held, sizes, strict=True):
        if at < size:
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
            fraction = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}[tensor.dtype]
            with torch.no_grad():
                tensor.detach().view(-1).view(bits)[at] ^= 1 << (fraction - 1)
            return
        at -= size


def modules_of(model: Any) -> list[nn.Module]:
    """The modules of this rank: one model, or its pipeline stages."""
    return [part.module for part in model.parts]


@contextmanager
def in_backward(roots: list[nn.Module], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Call `change` with the gradient of the first layer that runs in this step."""
    caught: list[Tensor] = []

    def watch(module: nn.Module, given: Any, made: Any) -> None:
        if not caught and isinstance(made, Tensor) and made.requires_grad and made.is_floating_point():
            caught.append(made)
            made.register_hook(change)

    handles = [m.register_forward_hook(watch) for root in roots for m in root.modules() if not list(m.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
