"""A session whose ranks suffer the faults that a rehearsal orders from inside: `weft chaos` sets WEFT_FAULTS."""

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
from weft.parallel.spread_model import Batch
from weft.training.step import Gradients, Stepper

if TYPE_CHECKING:
    from weft.training.session import Session

VARIABLE = "WEFT_FAULTS"
"""Names the file of orders: a JSON list, replaced whole by the rehearsal. Markers of what struck lie beside it."""

Order = dict[str, Any]


def arm(session: Session) -> None:
    """Let the orders of a rehearsal strike this session; without one, nothing is changed."""
    if path := os.environ.get(VARIABLE):
        session.stepper = Armed.of(session.stepper, Orders(Path(path), session.mesh.rank))


class Orders:
    """What this rank is to suffer, looked up at the head of each step."""

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

    def due(self, step: int, phase: str, kinds: tuple[str, ...]) -> list[Order]:
        """Those that strike now: in this phase, of this step or of one that has passed."""
        return [o for o in self.known if o["step"] <= step and o["phase"] == phase and o["kind"] in kinds]

    def first_time(self, order: Order, step: int) -> bool:
        """Note that it strikes; false where it has struck this rank before, perhaps in another process."""
        marker = marker_of(self.path, order["id"], self.rank)
        try:
            handle = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps({"time": time.time(), "step": step, "phase": order["phase"]}))
        return True


def marker_of(path: Path, number: int, rank: int) -> Path:
    """Where a rank says that an order struck it."""
    return path.with_name(f"{path.stem}-{number}-rank-{rank}.struck")


@dataclass
class Armed(Stepper):
    """A stepper that suffers. Everything else is the stepper that it stands for."""

    orders: Orders | None = None

    @classmethod
    def of(cls, stepper: Stepper, orders: Orders) -> Self:
        return cls(**{f.name: getattr(stepper, f.name) for f in fields(stepper)}, orders=orders)

    def learning_rate(self) -> float:
        """Asked for at the head of each step, before its data are."""
        assert self.orders is not None
        self.orders.look()
        self._suffer("data")
        return super().learning_rate()

    def gradients(self, batches: list[Batch]) -> Gradients:
        assert self.orders is not None
        self._suffer("forward")
        step = self.state.step + 1
        for order in self.orders.due(step, "forward", ("spike",)):
            if order["step"] == step:  # this batch is poisoned, however often it is read
                self.orders.first_time(order, step)
                batches = [poison(b, self.job.model.vocab) for b in batches]
        orders = self.orders.due(step, "backward", ("nan", *ACTIONS))
        if not orders:
            return super().gradients(batches)

        def strike(gradient: Tensor) -> Tensor:
            self._suffer("backward")
            nan = [o for o in orders if o["kind"] == "nan" and self.orders and self.orders.first_time(o, step)]
            return gradient * float("nan") if nan else gradient

        with in_backward(modules_of(self.state.model), strike):
            return super().gradients(batches)

    def update(self, grads: Gradients, lr: float) -> Any:
        assert self.orders is not None
        self._suffer("update")
        done = super().update(grads, lr)
        for order in self.orders.due(self.state.step, "update", ("bitflip",)):
            if self.orders.first_time(order, self.state.step):
                flip(self.state.model.master_params, order["moment"])
                self.state.model.refresh()
        return done

    def _suffer(self, phase: str) -> None:
        assert self.orders is not None
        step = self.state.step + 1
        for order in self.orders.due(step, phase, tuple(ACTIONS)):
            if self.orders.first_time(order, step):
                ACTIONS[order["kind"]](self.mesh.device)


def fall_asleep(device: torch.device) -> None:
    time.sleep(3600)


def hold_the_lock(device: torch.device) -> None:
    """Wait for oneself inside C with Python's lock in hand; no signal ends that but SIGKILL."""
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def run_out_of_memory(device: torch.device) -> None:
    """Ask for more than any machine has: the error is the allocator's own."""
    torch.empty(1 << 48, dtype=torch.uint8, device=device)


ACTIONS: dict[str, Callable[[torch.device], None]] = {
    "sleep": fall_asleep,
    "gil": hold_the_lock,
    "oom": run_out_of_memory,
}


def poison(batch: Batch, vocab: int | None) -> Batch:
    """The batch with targets that nothing could foresee; the same for every rank that reads these samples."""
    targets = batch["targets"]
    if targets.is_floating_point():
        wrong = targets * 1000
    elif vocab and targets.dim() > 1:
        wrong = torch.full_like(targets, vocab - 1)  # the rarest token of most vocabularies
    else:
        wrong = targets.roll(1, 0)
    return {**batch, "targets": wrong}


def flip(weights: dict[str, Tensor], moment: float) -> None:
    """Flip a bit that changes a number visibly and stays silent: one of the highest of its fraction."""
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


def modules_of(spread_model: Any) -> list[nn.Module]:
    """The modules of this rank, of one model or of its stages."""
    return (
        [stage.module for stage in spread_model.stages.values()]
        if hasattr(spread_model, "stages")
        else [spread_model.module]
    )


@contextmanager
def in_backward(roots: list[nn.Module], strike: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Call `strike` with a gradient on its way back through the first layer that computes in this step."""
    caught: list[Tensor] = []

    def watch(module: nn.Module, given: Any, made: Any) -> None:
        if not caught and isinstance(made, Tensor) and made.requires_grad and made.is_floating_point():
            caught.append(made)
            made.register_hook(strike)

    handles = [m.register_forward_hook(watch) for root in roots for m in root.modules() if not list(m.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
