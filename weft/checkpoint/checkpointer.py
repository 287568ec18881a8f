"""Checkpoints of a run: saved while training goes on, found again after anything, opened under any layout."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from weft.checkpoint.contents import Snapshot
from weft.checkpoint.format import (
    Damaged,
    Found,
    Manifest,
    check_file,
    checkpoint_name,
    list_checkpoints,
    newest_good,
    read_manifest,
    read_meta,
    restore,
    verify,
)
from weft.checkpoint.reader import Index
from weft.checkpoint.retention import retain, sweep
from weft.checkpoint.whole import load_full
from weft.checkpoint.writer import Writer, run_save
from weft.comm.agreement import Everyone, T, in_words
from weft.job.errors import JobError

__all__ = ["Checkpoints", "Damaged", "Found", "list_checkpoints", "load_full", "newest_good", "read_meta", "verify"]

PATIENCE_S = 600.0
"""How long the end of a run waits for a disk that does not answer."""

Event = tuple[str, dict[str, Any]]


def _ignore(name: str, **fields: Any) -> None:
    """The on_event of a caller that wants no events."""


class Checkpoints:
    """The checkpoints in one folder.

    group is a Gloo group of all ranks, made for this purpose alone: its collectives run in a thread while a checkpoint
    is written. None is one process, without torch.distributed. Every method but poll and wait is collective.
    on_event is called on every rank, always in the caller's thread. any_rank tells whether something is true on any
    rank, by another group than this one; without it a save waits for the one before. misfit says what is wrong with a
    checkpoint's meta, which whoever wrote the files could write as well. fence is called before a checkpoint takes its
    name, and raises where this rank may commit nothing any more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup | None,
        keep: int,
        keep_every: int,
        background: bool,
        on_event: Callable[..., None] = _ignore,
        any_rank: Callable[[bool], bool] | None = None,
        misfit: Callable[[dict[str, Any]], str | None] = lambda meta: None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        if keep < 1:
            raise JobError(f"checkpoint.keep is {keep}; at least 1 must be kept")
        self.folder, self.group, self.background = Path(folder), group, background
        self.keep, self.keep_every = keep, keep_every
        self.everyone = Everyone(group)
        self.durable: int | None = None
        """The step of the last checkpoint that this object saved and that is known to be on disk."""
        self._on_event, self._any_rank, self._misfit, self._fence = on_event, any_rank, misfit, fence
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._queue: deque[tuple[Manifest, Snapshot]] = deque()
        self._thread: threading.Thread | None = None
        self.damaged: set[Path] = set()
        """Checkpoints that were found to be damaged, and are skipped and left alone."""

    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], *, wait: bool = False, patient: bool = False
    ) -> None:
        """Save the tensors as they are now, with rank 0's meta; a name has one meaning on all ranks.

        Returns when the tensors may change again; with wait, or not in the background, when the checkpoint is durable.
        A save that fails is an event, checkpoint_failed, and never an exception. While one is being written a second
        waits in memory; a third is refused, by that event, where a slow or dead disk would else hold up training,
        unless it is patient.
        """
        waits = wait or not self.background
        if waits or patient or self._any_rank is None:
            self.wait()
        self.poll()
        if self._any_rank is not None and self._any_rank(len(self._queue) > 0):
            path = self.folder / checkpoint_name(step)
            why = "the one before it waits for a disk that is still busy with an earlier one"
            self._on_event("checkpoint_failed", step=step, path=path, why=why)
            return
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name!r} is a {type(tensor).__name__}; what is no tensor goes into meta")
        manifest = Manifest(step, json.loads(json.dumps(meta)), {})
        snapshot = Snapshot(tensors, copy=not waits)
        with self._changed:
            self._queue.append((manifest, snapshot))
            if self._thread is None:
                # A daemon: a run that ends in an error must not linger in a collective whose other ranks are gone.
                self._thread = threading.Thread(target=self._write_queue, daemon=True, name="checkpoint")
                self._thread.start()
        if waits:
            self.wait()

    def put(self, step: int, snapshot: Snapshot, meta: dict[str, Any]) -> None:
        """Save what was put together elsewhere; returns when it is durable, or could not be."""
        self.wait()
        self._write(Manifest(step, json.loads(json.dumps(meta)), {}), snapshot)
        self.wait()

    def poll(self) -> None:
        """Report what has finished meanwhile; never waits."""
        if not self._events:
            return
        with self._changed:
            events, self._events = self._events, []
        for name, fields in events:
            self._on_event(name, **fields)

    def wait(self, patience_s: float = PATIENCE_S) -> None:
        """Return when nothing is being written any more; what went wrong is reported, not raised."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread is None, patience_s):
                why = f"the disk has not answered for {patience_s:g} s"
                self._events.append(("checkpoint_failed", {"step": None, "path": self.folder, "why": why}))
        self.poll()

    def _write_queue(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                manifest, snapshot = self._queue.popleft()
            try:
                self._write(manifest, snapshot)
            except Exception as error:  # whatever it was, training goes on
                final = self.folder / checkpoint_name(manifest.step)
                self._note("checkpoint_failed", step=manifest.step, path=final, why=in_words(error))

    def newest(self, at_most: int | None = None) -> Found | None:
        """The newest good checkpoint (of a step at most so large), the same on all ranks; damaged ones are reported,
        skipped and left alone."""
        return next(self._good(at_most), None)

    def load(self, found: Found, tensors: dict[str, Tensor]) -> None:
        """Fill the tensors in place. Raises on every rank alike: JobError when they do not fit, Damaged otherwise."""
        self.wait()
        if on_meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise TypeError(f"{on_meta[0]!r} is on the meta device and cannot be filled in place")
        misfit, damage = None, None
        try:
            index = Index(found.path)
            misfit = index.mismatch(tensors)
        except Exception as error:
            damage = error.why if isinstance(error, Damaged) else in_words(error)
        verdicts = self.everyone.gather((damage, misfit))
        for why, _ in verdicts:
            if why:
                raise self._report_damaged(found.path, why)
        for _, text in verdicts:
            if text:
                raise JobError(text)
        try:
            index.fill(tensors, self.group)
        except (CheckpointException, Exception) as error:
            why = f"its files are whole, but it cannot be loaded: {in_words(error)}"
            raise self._report_damaged(found.path, why) from error

    def load_newest(self, tensors: dict[str, Tensor], at_most: int | None = None) -> Found | None:
        """Load the newest checkpoint that can be loaded; None when there is none to try, the tensors untouched."""
        failed: Damaged | None = None
        for found in self._good(at_most):
            try:
                self.load(found, tensors)
            except Damaged as error:
                failed = error
            else:
                return found
        if failed is not None:
            # The tensors may hold half of what was read: a run that began anew from them would begin with garbage.
            raise failed
        return None

    def _write(self, manifest: Manifest, snapshot: Snapshot) -> None:
        began = time.monotonic()
        final = self.folder / checkpoint_name(manifest.step)
        writer = Writer(self.folder, manifest, replaces_damaged=final in self.damaged, fence=self._fence)
        try:
            run_save(snapshot, writer, self.group)
        except (CheckpointException, Exception) as error:
            if isinstance(error, CheckpointException):
                writer.discard()
            self._note("checkpoint_failed", step=manifest.step, path=final, why=in_words(error))
            return
        seconds = round(time.monotonic() - began, 3)
        if (why := self._read_back(final)) is not None:
            self.damaged.add(final)
            self._note("checkpoint_failed", step=manifest.step, path=final, why=f"read back after writing, {why}")
            return
        self.durable = manifest.step
        self.damaged.discard(final)
        fields = {"bytes": writer.total_bytes} if self.everyone.rank == 0 else {}
        self._note("checkpoint_saved", step=manifest.step, path=final, seconds=seconds, **fields)
        if self.everyone.rank == 0:
            if writer.aside is not None and ".damaged-" in writer.aside.name:
                self._note("damaged", path=writer.aside, why=f"moved here when step {manifest.step} was saved again")
            try:
                retain(self.folder, manifest.step, self.keep, self.keep_every, self.damaged, self._note)
            except OSError as error:
                self._note("checkpoint_kept", path=self.folder, why=f"old ones could not be deleted: {error}")

    def _read_back(self, path: Path) -> str | None:
        """What is wrong with a checkpoint that was just written, read from the disk itself; the ranks share the files.

        Until this is done the older ones stay, so the only good one is never deleted.
        """
        try:
            files = read_manifest(path).files
            mine = sorted(files)[self.everyone.rank :: self.everyone.world]
            whys = [why for name in mine if (why := check_file(path, name, files[name], cached=False))]
        except Exception as error:
            whys = [in_words(error)]
        return next((why for found in self.everyone.gather(whys) for why in found), None)

    def _good(self, at_most: int | None = None) -> Iterator[Found]:
        """The good checkpoints, newest first; each is read in full before it is given, spread over the ranks."""
        self.wait()
        swept = False
        for name in reversed(self._from_first(self._listed)):
            path = self.folder / name
            if path in self.damaged:
                continue
            manifest = self._checked(path)
            if manifest is None:
                continue
            if not swept:
                swept = True
                self._sweep(manifest.step)
            if at_most is None or manifest.step <= at_most:
                yield Found(manifest.step, path, manifest.meta)
        if not swept:
            self._sweep(-1)

    def _listed(self) -> list[str]:
        restore(self.folder)
        return [path.name for path in list_checkpoints(self.folder)]

    def _checked(self, path: Path) -> Manifest | None:
        """The manifest, when every file is as it says; else None, and the damage is reported."""
        manifest, why = self._from_first(lambda: _manifest_or_why(path))
        if manifest is not None:
            mine = sorted(manifest.files)[self.everyone.rank :: self.everyone.world]
            checks = (check_file(path, name, manifest.files[name]) for name in mine)
            whys = self.everyone.gather(next((why for why in checks if why), None))
            why = next((why for why in whys if why), None) or self._misfit(manifest.meta)
        if why is not None:
            self._report_damaged(path, why)
            return None
        return manifest

    def _sweep(self, good_step: int) -> None:
        """Let rank 0 clean up, and tell of it everywhere."""

        def look() -> list[Event]:
            sweep(self.folder, good_step, self.damaged, self._note)
            return self._events

        self._events = self._from_first(look)
        self.wait()

    def _from_first(self, ask: Callable[[], T]) -> T:
        """What rank 0 reads, on every rank."""
        return self.everyone.first(ask, lambda why: JobError(f"the checkpoints in {self.folder} cannot be read: {why}"))

    def _report_damaged(self, path: Path, why: str) -> Damaged:
        self.damaged.add(path)
        self._on_event("damaged", path=path, why=why)
        return Damaged(path, why)

    def _note(self, name: str, **fields: Any) -> None:
        with self._changed:
            self._events.append((name, fields))


def _manifest_or_why(path: Path) -> tuple[Manifest | None, str | None]:
    try:
        return read_manifest(path), None
    except Damaged as error:
        return None, error.why
    except JobError as error:
        return None, str(error)
