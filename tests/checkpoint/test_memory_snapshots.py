"""In-memory snapshots: a ring of committed steps in shared memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.checkpoint import memory_snapshots as snapshots
from weft.checkpoint import snapshot_storage
from weft.checkpoint.memory_snapshots import AGREE_AFTER, MIN_COPIES, Snapshots, newest_common


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=4), st.none() | st.integers(0, 9))
def test_newest_common_step(held: list[set[int]], at_most: int | None) -> None:
    found = newest_common(held, at_most)
    fitting = [s for s in range(10) if all(s in h for h in held) and (at_most is None or s <= at_most)]
    assert found == (fitting[-1] if fitting else None)


def state(step: int) -> dict[str, torch.Tensor]:
    bits = torch.arange(7, dtype=torch.uint8) + step
    return {"w": torch.full((3, 5), float(step)), "bits": bits, "n": torch.tensor(step)}


def test_snapshots_survive_their_process_and_torn_ones_are_ignored(tmp_path: Path) -> None:
    first = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    for step in range(1, 6):
        first.take(step, state(step), {"step": step})
        if step < 5:
            first.seal(step, {"tokens": 10 * step})
    assert first.held() == [3, 4]  # the fifth was copied and never committed
    second = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    assert second.held() == [3, 4]
    into = {name: torch.zeros_like(t) for name, t in state(0).items()}
    assert second.holds(into)
    assert second.load(4, into) == {"step": 4, "tokens": 40}
    assert all(torch.equal(into[n], t) for n, t in state(4).items())
    assert not second.holds({"w": torch.zeros(1)})
    for path in tmp_path.glob("snap-0.*"):
        content = bytearray(path.read_bytes())
        content[60] ^= 1  # inside the table
        path.write_bytes(content)
    assert Snapshots(tmp_path, rank=0, keep=MIN_COPIES).held() == []


@pytest.mark.parametrize("rows", [2, 300])
def test_files_of_a_layout_with_other_shards_are_replaced(tmp_path: Path, rows: int) -> None:
    """A run that resumes from an earlier checkpoint drops all snapshots of the layout before, and then their files."""
    first = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    for step in (9, 10, 11):
        first.take(step, {"w": torch.full((100, 64), float(step))}, {})
        first.seal(step, {})
    second = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    second.forget_after(8)
    for step in (9, 10):
        second.take(step, {"w": torch.full((rows, 64), float(step))}, {})
        second.seal(step, {})
    into = {"w": torch.zeros(rows, 64)}
    found = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    assert found.held() == [9, 10] and found.holds(into)
    found.load(10, into)
    assert torch.equal(into["w"], torch.full((rows, 64), 10.0))
    sizes = {path.stat().st_size for path in tmp_path.glob("snap-0.*")}
    assert len(sizes) == 1 and rows * 64 * 4 < sizes.pop() < rows * 64 * 4 + 10_000


def test_snapshot_ring_is_complete_after_every_fault(tmp_path: Path) -> None:
    for attempt in range(8):  # each is broken while a step is copied, and some steps are undone
        ring = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
        if attempt:
            ring.load(min(ring.held()), {name: torch.zeros_like(t) for name, t in state(0).items()})
        for step in range(10 * attempt, 10 * attempt + 5):
            ring.take(step, state(step), {})
            ring.seal(step, {})
        assert ring.held() == list(range(10 * attempt + 5 - MIN_COPIES, 10 * attempt + 5))
        ring.take(10 * attempt + 5, state(0), {})
    assert len(list(tmp_path.glob("snap-0.*"))) == MIN_COPIES


def test_background_ring_does_not_block(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    ring.background, ring.every = True, AGREE_AFTER  # as on a GPU
    assert not ring.due(1) and ring.due(AGREE_AFTER)
    for step in range(1, AGREE_AFTER + 1):
        ring.tick(step)
    ring.take(AGREE_AFTER, state(1), {})
    ring.seal(AGREE_AFTER, {})
    deadline = time.monotonic() + 300
    step = AGREE_AFTER
    while not ring.held() and time.monotonic() < deadline:
        step += 1
        ring.take(step, state(step), {})
        ring.seal(step, {})
        time.sleep(0.01)
    assert ring.held() and min(ring.held()) > AGREE_AFTER - 1
    assert ring.preferred_interval() == 1  # these few bytes are copied in no time
    ring._copies.clear()
    ring._steps.extend([0.3] * 8)
    ring._copies.append(0.36)  # 0.09 s of it are not hidden by a step
    assert ring.preferred_interval() == 40


def test_large_ring_grows_by_one_file_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LARGE_RING_BYTES", {"cuda": 1000, "cpu": 1000})
    ring = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    assert ring.due(1)
    for step in range(1, MIN_COPIES + 3):
        ring.take(step, state(step), {})
        ring.seal(step, {})
        assert len(list(tmp_path.glob("snap-0.*"))) == min(step, MIN_COPIES)
        assert ring.held() == list(range(max(1, step - MIN_COPIES + 1), step + 1))


def test_interval_is_kept_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that recovers copies as often as before; small states are copied at every step from the first on."""
    gpu = Snapshots(tmp_path / "gpu", rank=0, device=torch.device("cuda"))
    assert gpu.due(1)
    monkeypatch.setattr(snapshots, "LARGE_RING_BYTES", {"cuda": 1000, "cpu": 1000})
    ring = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    ring.tick(1)
    ring.every = 2  # agreed by the ranks
    ring.take(2, state(2), {"step": 2})
    ring.seal(2, {})
    again = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    assert again.load(2, {name: torch.zeros_like(t) for name, t in state(0).items()}) == {"step": 2}
    assert again.every == 2
    again.take(4, state(4), {})
    assert not again.tick(4)  # nothing to agree on yet
    again.agree([again.preferred_interval(), 9])  # this rank has measured no copy
    assert again.every == 2 and [again.tick(step) for step in range(5, 9)] == [False, False, False, True]


def test_interval_is_short_until_copies_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a large state are allocated for many steps, and an assumed rate would delay the first copy further."""
    monkeypatch.setattr(snapshots, "LARGE_RING_BYTES", {"cuda": 1000, "cpu": 1000})
    allocated = threading.Event()
    real = snapshot_storage.allocate
    monkeypatch.setattr(snapshot_storage, "allocate", lambda path, size: allocated.wait() and real(path, size))
    ring, tried = Snapshots(tmp_path, rank=0, world=1), []
    ring.background = True
    for step in range(1, 50):
        if ring.due(step):
            tried.append(step)
            ring.take(step, state(step), {})
            if step == 24:
                allocated.set()
                assert ring._allocator is not None
                ring._allocator.join()
            ring.seal(step, {})
        if ring.tick(step):
            ring.agree([ring.preferred_interval()])
        if ring.held():
            break
    assert tried == [1, 8, 16, 24, 32] and ring.held() == [32]
    assert ring.every == 1 and ring._measured  # a copy of some bytes costs nothing


def test_the_only_snapshot_is_kept_until_another_file_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "LARGE_RING_BYTES", {"cuda": 1000, "cpu": 1000})
    first = Snapshots(tmp_path, rank=0, world=1)
    first.take(1, state(1), {})
    first.seal(1, {})
    allocated = threading.Event()
    real = snapshot_storage.allocate
    monkeypatch.setattr(snapshot_storage, "allocate", lambda path, size: allocated.wait() and real(path, size))
    again = Snapshots(tmp_path, rank=0, world=1)
    again.load(1, state(0))
    again.background = True
    again.take(2, state(2), {})
    assert again._open is None and again.held() == [1]
    allocated.set()
    assert again._allocator is not None
    again._allocator.join()
    again.take(3, state(3), {})
    assert again.held() == [1]  # while the other one is written
    again.seal(3, {})
    assert again.held() == [1, 3]


def test_weights_are_copied_before_the_next_update(tmp_path: Path) -> None:
    weight, seen = torch.zeros(4), torch.zeros(4)
    shards = {"model.w": weight, "buffer.seen": seen}
    ring = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    into = {name: torch.empty(4) for name in shards}
    for step in (1, 2, 3):
        weight.fill_(step)
        seen.fill_(step)
        ring.take(step, shards, {})
        seen.fill_(-1)  # the next forward pass
        if step == 2:  # else it is committed before the next update: an evaluation is due
            ring.settle()
            weight.fill_(-1)
        ring.seal(step, {})
        ring.load(step, into)
        assert [into[name].tolist() for name in shards] == [[step] * 4] * 2
    ring.take(4, shards, {})
    ring.drop()
    ring.seal(4, {})
    assert ring.held() == [2, 3]


def record_registrations(monkeypatch: pytest.MonkeyPatch, at_most: int = 1 << 30) -> dict[int, int]:
    """Sizes of the registered parts by address; a GPU that registers so many of them."""
    registered: dict[int, int] = {}

    def register(part: torch.Tensor) -> bool:
        assert part.data_ptr() not in registered, "mapped where other memory is still registered"
        if len(registered) == at_most:
            return False
        registered[part.data_ptr()] = part.numel()
        return True

    def unregister(parts: list[torch.Tensor]) -> None:
        for part in parts:
            del registered[part.data_ptr()]

    monkeypatch.setattr(snapshot_storage, "register", register)
    monkeypatch.setattr(snapshot_storage, "unregister", unregister)
    return registered


def test_memory_is_page_locked_by_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all of it would block the training thread; a copy may not cross from one region into the next."""
    monkeypatch.setattr(snapshot_storage, "REGION_BYTES", 1 << 12)
    sizes = ((100,), (3000,), (), (7, 100), (9,), (2048,), (0,))
    shards = {f"model.{i}": torch.randn(size) for i, size in enumerate(sizes)}
    shards["model.t"] = torch.randn(50, 60).T
    table = snapshot_storage.Table.of(shards)
    for at_most in (100, 2):  # a region cannot be locked: none is
        registered = record_registrations(monkeypatch, at_most)
        slot = snapshot_storage.Slot(table, torch.zeros(table.size, dtype=torch.uint8))
        slot.pin()
        assert slot.pinned is (at_most == 100)
        assert sum(registered.values()) == (table.size if slot.pinned else 0)
        assert max(registered.values(), default=0) <= 1 << 12
        slot._copy(shards)
        first = slot.memory.data_ptr()
        for view in slot._parts({name: t.contiguous() for name, t in shards.items()})[0]:
            if slot.pinned and view.numel():
                at = view.data_ptr() - first
                assert at >> 12 == (at + 4 * view.numel() - 1) >> 12
        into = {name: torch.zeros_like(t) for name, t in shards.items()}
        slot.read(into)
        assert all(torch.equal(into[name], t) for name, t in shards.items())


def test_only_the_snapshot_that_is_loaded_is_page_locked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are page-locked with the next snapshot, on a GPU in the background."""
    ring = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    for step in (1, 2, 3):
        ring.take(step, state(step), {})
        ring.seal(step, {})
    registered = record_registrations(monkeypatch)
    monkeypatch.setattr(snapshot_storage.Slot, "_start_copies", lambda slot, shards: slot._copy(shards))
    again = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
    assert again.held() == [1, 2, 3] and not registered
    again.load(2, state(0))
    assert len(registered) == 1
    again.take(3, state(3), {})
    again.seal(3, {})
    assert len(registered) == MIN_COPIES and again.held() == [1, 2, 3]


def test_memory_is_unregistered_before_it_is_unmapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would copy from the old pages whatever is mapped at the same address afterwards."""
    registered = record_registrations(monkeypatch)
    monkeypatch.setattr(snapshot_storage.Slot, "_start_copies", lambda slot, shards: slot._copy(shards))
    for attempt in range(3):  # of one process
        ring = Snapshots(tmp_path, rank=0, keep=MIN_COPIES)
        for step in range(10 * attempt, 10 * attempt + 4):
            ring.take(step, state(step), {})
            ring.seal(step, {})
        assert len(registered) == MIN_COPIES
        ring.take(99, {"w": torch.zeros(5000)}, {})  # another layout: new files
        assert len(registered) == MIN_COPIES
        del ring
        assert not registered


def test_budget_of_a_large_state_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a quarter of the free memory: two copies, one if two do not fit, none if one does not."""
    monkeypatch.setattr(snapshots, "LARGE_RING_BYTES", {"cuda": 1000, "cpu": 1000})
    size = snapshot_storage.Table.of(state(0)).size
    for free, kept in ((100 * size, 2), (9 * size, 2), (5 * size, 1), (3 * size, 0)):
        monkeypatch.setattr(
            snapshots.psutil, "virtual_memory", lambda free=free: type("Memory", (), {"available": free})
        )
        ring = Snapshots(tmp_path / str(free), rank=0, world=1)
        ring.folder.mkdir()  # type: ignore[union-attr]
        for step in range(1, 5):
            ring.take(step, state(step), {})
            ring.seal(step, {})
        assert len(ring.held()) == kept
        assert bool(ring.refused) == (kept == 0)
        assert kept == 0 or ring.summary.startswith(f"snapshots: {kept} of ")
