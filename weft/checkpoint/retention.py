"""Deletes old checkpoints and what interrupted saves have left."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.checkpoint.format import CheckpointFolder, checkpoint_name, entries, leftovers, remove, verify
from weft.job.files.store_path import AnyPath

Note = Callable[..., None]


def retain(folder: AnyPath, written: int, keep: int, keep_every: int, damaged: set[AnyPath], note: Note) -> None:
    """Delete the checkpoints that are not to be kept; damaged ones are neither counted nor deleted."""
    good = {
        entry.step: entry
        for entry in entries(folder)
        if entry.kind == "good" and entry.path not in damaged and not verify(entry.path, checksum=False)
    }
    for step in surplus(good, keep=keep, keep_every=keep_every, written=written):
        _remove(good[step], f"only the newest {keep} are kept", note)
    for entry in leftovers(folder, written, damaged):
        _remove(entry, f"left by an interrupted save; {checkpoint_name(written)} is good", note)


def surplus(steps: Iterable[int], *, keep: int, keep_every: int, written: int) -> list[int]:
    """Which of the good checkpoints are deleted, now that the one of step `written` is durable."""
    ordered = sorted(set(steps))
    kept = {*ordered[-keep:], written}
    return [s for s in ordered if s not in kept and not (keep_every and s % keep_every == 0)]


def sweep(folder: AnyPath, good_step: int, damaged: set[AnyPath], note: Note) -> None:
    """Report what interrupted saves left, and delete it where a good checkpoint is as new."""
    gone = leftovers(folder, good_step, damaged)
    for entry in entries(folder):
        if entry.kind == "tmp":
            end = (
                f"deleted, since {checkpoint_name(good_step)} is good"
                if entry in gone
                else "left alone, since no newer checkpoint is good"
            )
            note("damaged", path=entry.path, why=f"half-written: its save was interrupted; {end}")
    for entry in gone:
        _remove(entry, "left by an interrupted save or deletion", note)


def _remove(entry: CheckpointFolder, why: str, note: Note) -> None:
    try:
        remove(entry)
    except OSError as error:
        note("checkpoint_kept", path=entry.path, why=f"it could not be deleted: {error}")
    else:
        note("checkpoint_removed", path=entry.path, why=why)
