"""Storage of a snapshot: a file in shared memory or ordinary memory, and the table of its tensors."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.snapshot_file import HEAD, MAGIC, SEAL, read_table, sealed_step
from weft.checkpoint.snapshot_memory import allocate, copy_stream, map_file, map_pages, register, unregister
from weft.comm.foreach_internals import foreach_copy_

ALIGN = 64
UPDATE_ONLY = ("model.", "optim.", "ema.", "gradient.")
"""Prefixes of tensors that only an update changes: copied before the next update, while ranks wait for each other."""
REGION_BYTES = 1 << 26
"""Bytes that are page-locked in one call, during which no other thread of the process can call CUDA (3 ms). CUDA copies
only within a region, so tensors that cross its end are copied in parts."""
PIN_PAUSE = 3.0
"""Pause after each region that is page-locked beside training, in multiples of the time that this took."""


class Table:
    """The offset of each tensor in a file, as text that is the same for every step."""

    def __init__(self, entries: list[tuple[str, str, list[int], int]], head: int, size: int):
        self.entries, self.head, self.size = entries, head, size
        self.text = json.dumps(entries)

    @classmethod
    def of(cls, shards: Mapping[str, Tensor]) -> Table:
        rows = [(n, str(t.dtype).removeprefix("torch."), list(t.shape), 0) for n, t in shards.items()]
        head = -(-(HEAD.size + 2 * len(json.dumps(rows)) + 16 * len(rows) + 4096) // 4096) * 4096
        entries, offset = [], head
        for (name, dtype, shape, _), tensor in zip(rows, shards.values(), strict=True):
            entries.append((name, dtype, shape, offset))
            offset += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        return cls(entries, head, max(offset, head + ALIGN))


class Slot:
    """Storage of one snapshot."""

    def __init__(
        self, table: Table, memory: Tensor, sealed: int = -1, meta: dict[str, Any] | None = None,
        path: Path | None = None, populated: bool = True,
    ):  # fmt: skip
        self.table, self.memory, self.sealed, self.meta, self.path = table, memory, sealed, meta or {}, path
        self.populated = populated
        """Whether its pages are mapped."""
        self.bytes = memoryview(memory.numpy().data)
        self._used: dict[str, tuple[dict[str, Tensor], dict[str, list[int]]]] = {}
        self.use(table)
        self.pinned: bool | None = None
        """Whether a GPU can copy into it asynchronously; None: not tried yet."""
        self._pinning = threading.Lock()
        self._regions: list[Tensor] = []
        """Page-locked parts of the memory."""
        self.copied: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.copy_s = 0.0
        self._uncopied: dict[str, Tensor] = {}

    def use(self, table: Table) -> None:
        """Hold the tensors of this table, in the same memory."""
        if table.text not in self._used:
            views = {name: _view(self.memory, dtype, shape, at) for name, dtype, shape, at in table.entries}
            cuts = {name: cuts for name, _, _, at in table.entries if (cuts := _cuts(views[name], at))}
            self._used[table.text] = views, cuts
        self.table = table
        self.views, self.cuts = self._used[table.text]
        """`cuts`: elements of a tensor at which a region begins."""

    @classmethod
    def found(cls, path: Path) -> Slot | None:
        """The sealed snapshot that an earlier process left in a file; None if there is none."""
        table, step = read_table(path), sealed_step(path)
        if table is None or step is None or not table[0]:
            return None
        entries, meta = table
        try:
            size = path.stat().st_size
            return cls(Table(entries, entries[0][3], size), map_file(path, size), step, meta, path, False)
        except (OSError, TypeError, AttributeError, RuntimeError):
            return None

    def pin(self, pause: float = 0.0) -> None:
        """Page-lock the memory if CUDA is used, with pauses for the CUDA calls of other threads."""
        with self._pinning:
            if self.pinned is not None:
                return
            if not self.populated and torch.cuda.is_initialized():
                map_pages(self.memory)
            parts, done = self.memory.split(REGION_BYTES), self._regions
            for part in parts:
                began = time.perf_counter()
                if not register(part):
                    break
                done.append(part)
                time.sleep(pause * (time.perf_counter() - began))
            self.pinned = len(done) == len(parts)
            if self.pinned:
                # Memory that is unmapped while registered with CUDA stays registered, and other memory at the same
                # address, such as a batch, would be copied from the old pages. The process outlives the slots of an
                # attempt.
                weakref.finalize(self, unregister, done).atexit = False
            else:
                unregister(done)
                done.clear()

    def unpin(self, pause: float = 0.0) -> None:
        """Undo pin(), which takes as long."""
        with self._pinning:
            while self._regions:
                began = time.perf_counter()
                unregister([self._regions.pop()])
                time.sleep(pause * (time.perf_counter() - began))
            self.pinned = None

    def unseal(self) -> None:
        SEAL.pack_into(self.bytes, 8, 0)
        self.sealed = -1

    @torch.no_grad()
    def write(self, shards: Mapping[str, Tensor]) -> None:
        self.unseal()
        if self.pinned:
            return self._start_copies(shards)
        self._uncopied, self.copy_s = {n: t for n, t in shards.items() if n.startswith(UPDATE_ONLY)}, 0.0
        self._copy({n: t for n, t in shards.items() if n not in self._uncopied})

    def _is_split(self, name: str) -> bool:
        return bool(self.pinned) and name in self.cuts

    def _parts(self, shards: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the snapshot and the shards that belong to them, none of which crosses the end of a region."""
        views, parts = list[Tensor](), list[Tensor]()
        for name, shard in shards.items():
            if self._is_split(name):
                views += self.views[name].view(-1).tensor_split(self.cuts[name])
                parts += shard.view(-1).tensor_split(self.cuts[name])
            else:
                views.append(self.views[name])
                parts.append(shard)
        return views, parts

    @torch.no_grad()
    def _copy(self, shards: Mapping[str, Tensor]) -> None:
        if shards:
            began = time.thread_time()  # without the time of other processes on a busy machine
            into, source = self._parts({n: t.contiguous() if self._is_split(n) else t for n, t in shards.items()})
            foreach_copy_(into, source, non_blocking=bool(self.pinned))
            self.copy_s += time.thread_time() - began

    def _start_copies(self, shards: Mapping[str, Tensor]) -> None:
        """Copy UPDATE_ONLY in another stream, while the next step computes, until settle(). The other tensors change
        before settle() is called (buffers and fp8 maxima in the forward pass, residuals in the backward pass) or are
        temporary, so they are copied in the stream of the step."""
        later = {n: t for n, t in shards.items() if n.startswith(UPDATE_ONLY)}
        self._copy({n: t for n, t in shards.items() if n not in later})
        stream = copy_stream()
        stream.wait_stream(torch.cuda.current_stream())
        self.copied = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            self.copied[0].record()
            self._copy(later)
            self.copied[1].record()
        for shard in later.values():
            shard.record_stream(stream)

    def settle(self) -> None:
        """Before the next update: copy the remaining tensors, and let later GPU work wait for the copies."""
        waited, self._uncopied = self._uncopied, {}
        self._copy(waited)
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied[1])

    def forget(self) -> None:
        """Cancel the remaining copies."""
        self._uncopied = {}

    def seal(self, step: int, meta: dict[str, Any]) -> None:
        self.settle()
        if self.copied is not None:
            self.copied[1].synchronize()
            self.copy_s = self.copied[0].elapsed_time(self.copied[1]) / 1e3
        text = f'{{"meta": {json.dumps(meta)}, "tensors": {self.table.text}}}'.encode()
        if HEAD.size + len(text) > self.table.head:
            raise ValueError(f"the metadata of a snapshot has {len(text)} bytes; {self.table.head} were reserved")
        self.bytes[HEAD.size : HEAD.size + len(text)] = text
        HEAD.pack_into(self.bytes, 0, MAGIC, 0, self.table.head, len(text), zlib.crc32(text))
        SEAL.pack_into(self.bytes, 8, step + 1)
        self.meta, self.sealed = json.loads(json.dumps(meta)), step

    @torch.no_grad()
    def read(self, shards: Mapping[str, Tensor]) -> None:
        self.pin()
        whole = {n: torch.empty(t.shape, dtype=t.dtype, device=t.device) if self._is_split(n) and not t.is_contiguous()
                 else t for n, t in shards.items()}  # fmt: skip
        source, into = self._parts(whole)
        foreach_copy_(into, source)
        for name, tensor in whole.items():
            if tensor is not shards[name]:
                shards[name].copy_(tensor)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def pin_in_background(slots: list[Slot], device: torch.device) -> None:
    """Page-lock snapshots while the model that they will be loaded into is built."""

    def run() -> None:
        with _on(device):
            for slot in slots:
                slot.pin()

    threading.Thread(target=run, name="snapshots", daemon=True).start()


def unpin_in_background(slots: list[Slot], device: torch.device) -> None:
    """Release the memory of snapshots that are no longer used, beside training."""

    def run() -> None:
        with _on(device):
            while slots:
                slots.pop().unpin(PIN_PAUSE)

    threading.Thread(target=run, name="snapshots", daemon=True).start()


class SlotAllocator(threading.Thread):
    """Allocates slots, and pins those that an earlier process left. That takes a minute for tens of gigabytes, so a run
    on a GPU does not wait for it.

    `last`: these slots complete the ring.
    """

    def __init__(
        self, table: Table, size: int, found: list[Slot], paths: list[Path | None], device: torch.device,
        background: bool, last: bool,
    ):  # fmt: skip
        super().__init__(name="snapshots", daemon=True)
        self.table, self.size, self.found, self.paths, self.device, self.last = table, size, found, paths, device, last
        self.pause = PIN_PAUSE if background else 0.0
        self.slots: list[Slot] = []
        self.error: Exception | None = None
        if background:
            self.start()
        else:
            self.run()

    def run(self) -> None:
        with _on(self.device):
            try:
                for slot in self.found:
                    slot.pin(self.pause)
                for path in self.paths:
                    memory = allocate(path, self.size)
                    self.slots.append(Slot(self.table, memory, path=path))
                    self.slots[-1].pin(self.pause)
                    self.slots[-1].unseal()
            except (OSError, RuntimeError, ValueError) as error:
                self.error = error


def _cuts(view: Tensor, at: int) -> list[int]:
    size = view.element_size()
    ends = range(-(-(at + 1) // REGION_BYTES) * REGION_BYTES, at + view.numel() * size, REGION_BYTES)
    return [(end - at) // size for end in ends]


def _view(memory: Tensor, dtype: str, shape: list[int], at: int) -> Tensor:
    kind = getattr(torch, dtype)
    count = 1
    for n in shape:
        count *= n
    return memory[at : at + count * kind.itemsize].view(kind).view(shape)
