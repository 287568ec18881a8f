"""Checkpoints of a run: saved while training continues, verified when they are opened, loaded under any layout."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import torch.distributed as dist
from torch import Tensor

from weft.checkpoint.contents import CheckpointContents
from weft.checkpoint.format import (
    WEIGHTS_ONLY,
    Damaged,
    Manifest,
    SavedCheckpoint,
    check_file,
    checkpoint_name,
    list_checkpoints,
    read_manifest,
    restore,
)
from weft.checkpoint.reader import Index
from weft.checkpoint.retention import retain, sweep
from weft.checkpoint.writer import SaveFailed, write_checkpoint
from weft.comm.agreement import Agreement, T, error_text
from weft.job.errors import JobError, MachineError
from weft.job.files.store_path import AnyPath, StorePath

DISK_TIMEOUT_S = 600.0
"""How long the end of a run waits for a disk that does not respond."""

Event = tuple[str, dict[str, Any]]


def _ignore(name: str, **fields: Any) -> None:
    """Default of on_event."""


class Checkpointer:
    """Saves and loads the checkpoints of one folder.

    group is a Gloo group of all ranks that nothing else uses: its collectives run in a thread while a checkpoint is
    written. None means one process without torch.distributed. Every method except poll and wait is collective.
    on_event is called on every rank, always in the caller's thread. any_rank returns whether a flag is set on any rank,
    by another group than this one; without it a save waits for the one before. meta_problem returns what is wrong with
    a checkpoint's meta, if anything. fence is called before a checkpoint takes its name, and raises where this rank may
    no longer commit anything. after_save is called on rank 0 when a checkpoint is durable, in the thread that writes.
    """

    def __init__(
        self,
        folder: AnyPath,
        *,
        group: dist.ProcessGroup | None,
        keep: int,
        keep_every: int,
        background: bool,
        on_event: Callable[..., None] = _ignore,
        any_rank: Callable[[bool], bool] | None = None,
        meta_problem: Callable[[dict[str, Any]], str | None] = lambda meta: None,
        fence: Callable[[], None] = lambda: None,
        after_save: Callable[[], None] = lambda: None,
    ) -> None:
        if keep < 1:
            raise JobError(f"checkpoint.keep is {keep}; at least 1 must be kept")
        self.folder, self.group, self.background = folder, group, background
        self.keep, self.keep_every = keep, keep_every
        self.everyone = Agreement(group)
        self.durable: int | None = None
        """The step of the last checkpoint that was saved here and verified on disk."""
        self.failure = ""
        """Why the last checkpoint that could not be saved was not."""
        self._on_event, self._any_rank, self._meta_problem, self._fence = on_event, any_rank, meta_problem, fence
        self._after_save = after_save
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._queue: deque[tuple[Manifest, CheckpointContents]] = deque()
        self._thread: threading.Thread | None = None
        self.damaged: set[AnyPath] = set()
        """Checkpoints that were found to be damaged: skipped, and never deleted."""

    def save(
        self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], *, wait: bool = False, required: bool = False
    ) -> None:
        """Save the tensors as they are now, with rank 0's meta; a name means the same tensor on all ranks.

        Returns when the tensors may change again; with wait, or not in the background, when the checkpoint is durable.
        A save that fails is an event, checkpoint_failed, and never an exception. While one checkpoint is written, a
        second waits in memory; a third fails with that event instead of delaying training on a slow disk, unless it is
        required: then it waits for the others.
        """
        waits = wait or not self.background
        if waits or required or self._any_rank is None:
            self.wait()
        self.poll()
        if self._any_rank is not None and self._any_rank(len(self._queue) > 0):
            path = self.folder / checkpoint_name(step)
            why = "the one before it is still waiting for the disk, which is busy with an earlier one"
            self._on_event("checkpoint_failed", step=step, path=path, why=why)
            return
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name!r} is a {type(tensor).__name__}; what is no tensor goes into meta")
        manifest = Manifest(step, json.loads(json.dumps(meta)), {})
        contents = CheckpointContents(tensors, copy=not waits)
        with self._changed:
            self._queue.append((manifest, contents))
            if self._thread is None:
                # A daemon: a run that ends in an error must not wait in a collective whose other ranks are gone.
                self._thread = threading.Thread(target=self._write_queue, daemon=True, name="checkpoint")
                self._thread.start()
        if waits:
            self.wait()

    def save_contents(self, step: int, contents: CheckpointContents, meta: dict[str, Any]) -> None:
        """Save contents that were made elsewhere; returns when they are durable, or could not be."""
        self.wait()
        self._write(Manifest(step, json.loads(json.dumps(meta)), {}), contents)
        self.wait()

    def require(self, step: int) -> None:
        """Raise a MachineError with the reason unless the checkpoint of this step, the last one, is durable."""
        if self.durable == step:
            return
        before = "" if self.durable is None else f"; the last good checkpoint is of step {self.durable}"
        raise MachineError(
            f"step {step} was reached, but its checkpoint could not be written to {self.folder}: {self.failure}{before}"
        )

    def poll(self) -> None:
        """Report the saves that have finished since; never waits."""
        if not self._events:
            return
        with self._changed:
            events, self._events = self._events, []
        for name, fields in events:
            self._on_event(name, **fields)

    def wait(self, timeout_s: float = DISK_TIMEOUT_S) -> None:
        """Return when nothing is being written any more; failures are reported as events, not raised."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread is None, timeout_s):
                why = f"the disk has not responded for {timeout_s:g} s"
                self._note("checkpoint_failed", step=None, path=self.folder, why=why)
        self.poll()

    def _write_queue(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                manifest, contents = self._queue.popleft()
            try:
                self._write(manifest, contents)
            except Exception as error:  # training continues
                final = self.folder / checkpoint_name(manifest.step)
                self._note("checkpoint_failed", step=manifest.step, path=final, why=error_text(error))

    def newest(self, at_most: int | None = None) -> SavedCheckpoint | None:
        """The newest checkpoint to resume from, of step `at_most` or before, the same on all ranks; damaged ones are
        reported and skipped."""
        return next((found for found in self._good(at_most) if not found.meta.get(WEIGHTS_ONLY)), None)

    def load(self, found: SavedCheckpoint, tensors: dict[str, Tensor]) -> None:
        """Fill the tensors in place. Raises on every rank: JobError when they do not fit, else Damaged."""
        self.wait()
        if on_meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise TypeError(f"{on_meta[0]!r} is on the meta device and cannot be filled in place")
        mismatch, damage = None, None
        try:
            index = Index(found.path)
            mismatch = index.mismatch(tensors)
        except Exception as error:
            damage = error.why if isinstance(error, Damaged) else error_text(error)
        problems = self.everyone.gather((damage, mismatch))
        for why, _ in problems:
            if why:
                raise self._report_damaged(found.path, why)
        for _, text in problems:
            if text:
                raise JobError(text)
        why = None
        try:
            index.fill(tensors)
        except Exception as error:
            why = error_text(error)
        for rank, text in enumerate(self.everyone.gather(why)):
            if text:
                text = f"its files are intact, but rank {rank} cannot load it: {text}"
                raise self._report_damaged(found.path, text)

    def load_newest(self, tensors: dict[str, Tensor], at_most: int | None = None) -> SavedCheckpoint | None:
        """Load the newest checkpoint that can be loaded; None, with the tensors unchanged, when there is none."""
        failed: Damaged | None = None
        for found in self._good(at_most):
            if found.meta.get(WEIGHTS_ONLY):
                continue
            try:
                self.load(found, tensors)
            except Damaged as error:
                failed = error
            else:
                return found
        if failed is not None:
            # The tensors may be partly overwritten: a run must not start from them.
            raise failed
        return None

    def _write(self, manifest: Manifest, contents: CheckpointContents) -> None:
        began = time.monotonic()
        final = self.folder / checkpoint_name(manifest.step)
        damaged = final in self.damaged
        try:
            saved = write_checkpoint(
                contents, self.folder, manifest, self.everyone, replaces_damaged=damaged, fence=self._fence
            )
        except Exception as error:
            text = str(error) if isinstance(error, SaveFailed) else error_text(error)
            self._note("checkpoint_failed", step=manifest.step, path=final, why=text)
            return
        seconds = round(time.monotonic() - began, 3)
        if (why := self._read_back(final)) is not None:
            self.damaged.add(final)
            self._note("checkpoint_failed", step=manifest.step, path=final, why=f"read back after writing, {why}")
            return
        self.durable = manifest.step
        self.damaged.discard(final)
        fields = {"bytes": saved.bytes} if self.everyone.rank == 0 else {}
        self._note("checkpoint_saved", step=manifest.step, path=final, seconds=seconds, **fields)
        if self.everyone.rank == 0:
            self._after_save()
            if saved.replaced is not None and ".damaged-" in saved.replaced.name:
                self._note("damaged", path=saved.replaced, why=f"moved here when step {manifest.step} was saved again")
            try:
                retain(self.folder, manifest.step, self.keep, self.keep_every, self.damaged, self._note)
            except OSError as error:
                self._note("checkpoint_kept", path=self.folder, why=f"old ones could not be deleted: {error}")

    def _read_back(self, path: AnyPath) -> str | None:
        """What is wrong with a checkpoint that was just written, read back from the disk; the ranks share the files.

        Older checkpoints are deleted only after this, so the only good one never is.
        """
        try:
            files = read_manifest(path).files
            mine = sorted(files)[self.everyone.rank :: self.everyone.world]
            read = not isinstance(path, StorePath)  # a store compares checksums itself when it receives an object
            checks = (check_file(path, name, files[name], checksum=read, cached=False) for name in mine)
            whys = [why for why in checks if why]
        except Exception as error:
            whys = [error_text(error)]
        return next((why for found in self.everyone.gather(whys) for why in found), None)

    def _good(self, at_most: int | None = None) -> Iterator[SavedCheckpoint]:
        """The good checkpoints, newest first; each is verified first, and the ranks share its files."""
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
                yield SavedCheckpoint(manifest.step, path, manifest.meta)
        if not swept:
            self._sweep(-1)

    def _listed(self) -> list[str]:
        restore(self.folder)
        return [path.name for path in list_checkpoints(self.folder)]

    def _checked(self, path: AnyPath) -> Manifest | None:
        """The manifest, when every file matches it; else None, and the damage is reported."""
        body, why = self._from_first(lambda: _manifest_or_why(path))
        manifest = None if body is None else Manifest.of_json(body)
        if manifest is not None:
            mine = sorted(manifest.files)[self.everyone.rank :: self.everyone.world]
            checks = (check_file(path, name, manifest.files[name]) for name in mine)
            whys = self.everyone.gather(next((why for why in checks if why), None))
            why = next((why for why in whys if why), None) or self._meta_problem(manifest.meta)
        if why is not None:
            self._report_damaged(path, why)
            return None
        return manifest

    def _sweep(self, good_step: int) -> None:
        """Clean up on rank 0, and report it on every rank."""

        def look() -> list[Event]:
            sweep(self.folder, good_step, self.damaged, self._note)
            return [(name, {**fields, "path": str(fields["path"])}) for name, fields in self._events]

        events = self._from_first(look)
        for _, fields in events:
            fields["path"] = self.folder / PurePosixPath(fields["path"]).name
        self._events = [(name, fields) for name, fields in events]
        self.wait()

    def _from_first(self, ask: Callable[[], T]) -> T:
        """The value that rank 0 reads, on every rank."""
        kind = MachineError if isinstance(self.folder, StorePath) else JobError
        return self.everyone.first(ask, lambda why: kind(f"the checkpoints in {self.folder} cannot be read: {why}"))

    def _report_damaged(self, path: AnyPath, why: str) -> Damaged:
        self.damaged.add(path)
        self._on_event("damaged", path=path, why=why)
        return Damaged(path, why)

    def _note(self, name: str, **fields: Any) -> None:
        with self._changed:
            self._events.append((name, fields))
            if name == "checkpoint_failed":
                self.failure = fields["why"]


def _manifest_or_why(path: AnyPath) -> tuple[dict[str, Any] | None, str | None]:
    """The manifest for JSON, or why it cannot be used."""
    try:
        return read_manifest(path).to_json(), None
    except Damaged as error:
        return None, error.why
    except JobError as error:
        return None, str(error)
