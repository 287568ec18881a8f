"""Parts of a large state, so that each step has a snapshot although only a part of the state is copied in it.

With n parts, the snapshot of step k has part k mod n as it is after step k, and the gradients of all other weights in
step k. n snapshots in a row give the state of the last: each part is loaded, and the updates after it are repeated with
their gradients. With one part a snapshot has the whole state, and no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from weft.checkpoint.snapshot_storage import Slot, Table
from weft.optim.applied_update import AppliedUpdate

MAX_PARTS = 8
"""More parts would save little: the gradients of all weights are copied in every step."""
GRADIENT, FACTOR, TAKEN = "gradient.", "update.factor", "update.taken"

Repeat = Callable[[AppliedUpdate], None]
"""Applies an update again, to the weights that it has gradients of."""


class StateParts:
    """The parts of a state."""

    def __init__(self, shards: Mapping[str, Tensor], update: AppliedUpdate | None = None, count: int = 1):
        self.count = count
        by_weight: dict[str, list[str]] = (
            {name: [] for name in update.grads} if update is not None and count > 1 else {}
        )
        self.always: list[str] = []
        """Tensors that every snapshot has."""
        for name in shards:
            by_weight.get(_weight_of(name), self.always).append(name)
        sizes = {weight: sum(map(_bytes, (shards[n] for n in names))) for weight, names in by_weight.items()}
        filled, self.part_of = [0] * count, dict[str, int]()
        for weight in sorted(sizes, key=lambda w: -sizes[w]):
            self.part_of[weight] = part = filled.index(min(filled))
            filled[part] += sizes[weight]
        self.kinds = _kinds(shards)
        self.names = [[n for w in by_weight if self.part_of[w] == i for n in by_weight[w]] for i in range(count)]
        self.tables = [Table.of(self.tensors(i, shards, update)) for i in range(count)]
        self.size = max(table.size for table in self.tables)

    def tensors(self, step: int, shards: Mapping[str, Tensor], update: AppliedUpdate | None) -> dict[str, Tensor]:
        """What the snapshot of a step holds; gradients come first, since their memory is needed again first."""
        if self.count == 1 or update is None:
            return dict(shards)
        part = step % self.count
        grads = {f"{GRADIENT}{w}": g for w, g in update.grads.items() if self.part_of[w] != part}
        own = {n: shards[n] for n in (*self.names[part], *self.always)}
        return grads | own | {FACTOR: update.factor, TAKEN: update.taken}

    def table(self, step: int) -> Table:
        return self.tables[step % self.count]

    def fits(self, shards: Mapping[str, Tensor], update: AppliedUpdate | None) -> bool:
        """Whether a state and an update have the tensors that were cut."""
        grads = set() if update is None else update.grads.keys()
        return (self.count == 1 or grads == self.part_of.keys()) and _kinds(shards) == self.kinds


def cut_for(shards: Mapping[str, Tensor], update: AppliedUpdate, room: float) -> StateParts | None:
    """The smallest parts for which a ring of snapshots fits into `room` bytes: one for each part, and one that is being
    written. None if there are none."""
    cuts = (StateParts(shards, update, count) for count in range(min(MAX_PARTS, len(update.grads)), 1, -1))
    return next((cut for cut in cuts if (cut.count + 1) * cut.size <= room), None)


def parts_in(slot: Slot) -> int:
    """The number of parts of the state that a snapshot belongs to."""
    return int(slot.meta.get("parts", 1))


def chain_of(slot: Slot, slots: Iterable[Slot]) -> list[Slot]:
    """The snapshots from which the state of this one is restored, oldest first; empty if one of them is missing."""
    count = parts_in(slot)
    sealed = {s.sealed: s for s in slots if s.sealed >= 0 and parts_in(s) == count}
    steps = range(slot.sealed - count + 1, slot.sealed + 1)
    return [sealed[step] for step in steps] if slot.sealed >= 0 and all(step in sealed for step in steps) else []


def holds(chain: Sequence[Slot], shards: Mapping[str, Tensor]) -> bool:
    """Whether a chain has these tensors, and no others."""
    views = {n: v for slot in chain for n, v in slot.views.items() if not n.startswith((GRADIENT, FACTOR, TAKEN))}
    return _kinds(views) == _kinds(shards)


@torch.no_grad()
def load_chain(chain: Sequence[Slot], shards: Mapping[str, Tensor], repeat: Repeat | None) -> None:
    """Fill the shards in place with the state of the last snapshot."""
    restored: set[str] = set()
    for slot in chain:
        found = {w: slot.views[GRADIENT + w] for w in restored if GRADIENT + w in slot.views}
        if found and repeat is not None:
            device = shards[f"model.{next(iter(found))}"].device
            grads = {w: torch.empty_like(grad, device=device) for w, grad in found.items()}
            factor, taken = (torch.empty_like(slot.views[name], device=device) for name in (FACTOR, TAKEN))
            slot.read({f"{GRADIENT}{w}": grad for w, grad in grads.items()} | {FACTOR: factor, TAKEN: taken})
            repeat(AppliedUpdate(slot.meta["lr"], factor, taken, grads))
        slot.read({n: shards[n] for n in slot.views if n in shards})
        restored |= {n.removeprefix("model.") for n in slot.views if n.startswith("model.")}


def _weight_of(name: str) -> str:
    """The weight that a tensor of the state belongs to; empty if none."""
    if name.startswith("model."):
        return name.removeprefix("model.")
    return name.removeprefix("optim.").rpartition(".")[0] if name.startswith("optim.") else ""


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in tensors.items()}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
