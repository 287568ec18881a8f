"""Snapshots of a large state in parts: every step can be restored, by repeating updates."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weft.checkpoint import memory_snapshots, snapshot_storage
from weft.checkpoint.memory_snapshots import Snapshots
from weft.checkpoint.state_parts import MAX_PARTS, StateParts, cut_for
from weft.optim.applied_update import AppliedUpdate

SHAPES = {"embed": (40, 8), "block.0.w": (16, 16), "block.0.w.b": (16,), "block.1.w": (16, 16), "head": (8, 40)}


class Training:
    """Weights with momentum and counters, and a buffer that changes in every step."""

    def __init__(self) -> None:
        self.weights = {n: torch.full(shape, 0.5) for n, shape in SHAPES.items()}
        self.moments = {n: torch.zeros(shape) for n, shape in SHAPES.items()}
        self.seen, self.step = torch.zeros(3), 0
        self.update: AppliedUpdate | None = None

    def shards(self) -> dict[str, Tensor]:
        out = {f"model.{n}": w for n, w in self.weights.items()} | {"buffer.seen": self.seen}
        return out | {f"optim.{n}.exp_avg": m for n, m in self.moments.items()}

    def advance(self) -> None:
        self.step += 1
        random = torch.Generator().manual_seed(self.step)
        grads = {n: torch.randn(shape, generator=random).bfloat16() for n, shape in SHAPES.items()}
        taken = torch.tensor(float(self.step % 5 != 0))
        self.update = AppliedUpdate(0.1 / self.step, torch.tensor(1 / 3 + self.step), taken, grads)
        self.repeat(self.update)
        self.seen.add_(1.0)

    def repeat(self, update: AppliedUpdate) -> None:
        for name, grad in update.grads.items() if update.taken else ():
            self.moments[name].lerp_(grad.float() * update.factor, 0.1)
            self.weights[name].sub_(update.lr * self.moments[name])


def large(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """Let the state be a large one, and so many bytes of host memory be free."""
    monkeypatch.setattr(memory_snapshots, "LARGE_RING_BYTES", {"cuda": 1000, "cpu": 1000})
    memory = type("Memory", (), {"available": free})
    monkeypatch.setattr(memory_snapshots.psutil, "virtual_memory", lambda: memory)


def take(ring: Snapshots, run: Training, seal: bool = True) -> None:
    ring.settle()
    run.advance()
    if ring.due(run.step):
        ring.take(run.step, run.shards(), {"step": run.step}, run.update)
    if seal:
        ring.seal(run.step, {})


def room_for(count: int) -> float:
    """Free memory in which a ring of so many parts fits."""
    run = Training()
    run.advance()
    return 4.0 * (count + 1) * StateParts(run.shards(), run.update, count).size


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_step_is_restored_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    large(monkeypatch, room_for(count))
    run, ring = Training(), Snapshots(tmp_path, rank=0, world=1)
    for kill in range(6):  # each while a step is being copied
        first = run.step
        while ring.parts == 1 or not ring._complete or run.step < first + 2 * count + kill:
            take(ring, run)
        assert ring.parts == count and len(list(tmp_path.glob("part-0.*"))) == count + 1
        assert ring.held() == [run.step - 1, run.step]
        expected = {n: t.clone() for n, t in run.shards().items()}
        step = run.step
        take(ring, run, seal=False)
        del ring
        run = Training()
        ring = Snapshots(tmp_path, rank=0, world=1)
        assert ring.held() == [step] and ring.holds(run.shards())
        assert ring.load(step, run.shards(), run.repeat) == {"step": step}
        run.step = step
        assert all(torch.equal(expected[n], t) for n, t in run.shards().items())
    assert not list(tmp_path.glob("snap-0.*"))


def test_the_step_before_is_restored_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a bad batch, which is found before its step is committed."""
    large(monkeypatch, room_for(3))
    run, ring, expected = Training(), Snapshots(tmp_path, rank=0, world=1), dict[str, Tensor]()
    for step in range(1, 20):
        if step == 19:
            expected = {n: t.clone() for n, t in run.shards().items()}
        take(ring, run, seal=step < 19)
    ring.drop()
    ring.load(18, run.shards(), run.repeat)
    assert all(torch.equal(expected[n], t) for n, t in run.shards().items())
    run.step = 18
    for _ in range(2):
        take(ring, run)
        assert ring.held()[-1] == run.step  # the chain goes on
    ring.forget_after(18)
    assert ring.held() == []  # its first step was overwritten


def test_a_step_without_all_gradients_interrupts_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch, room_for(2))
    run, ring = Training(), Snapshots(tmp_path, rank=0, world=1)
    for step in range(1, 13):
        ring.settle()
        run.advance()
        ring.take(step, run.shards(), {}, None if step == 9 else run.update)
        ring.seal(step, {})
        if step > 4:
            assert (step in ring.held()) == (step not in (9, 10))


def test_parts_that_cannot_be_continued_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch, room_for(2))
    run, ring = Training(), Snapshots(tmp_path, rank=0, world=1)
    for _ in range(5):
        take(ring, run)
    again = Snapshots(tmp_path, rank=0, world=1)
    again.take(6, run.shards(), {})  # without the update
    again.seal(6, {})
    assert again.held() == [6] and not list(tmp_path.glob("part-*"))


def test_whole_states_are_copied_where_the_file_system_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large(monkeypatch, room_for(3))
    real = snapshot_storage.allocate

    def full(path: Path | None, size: int) -> Tensor:
        if len(list(tmp_path.glob("part-*"))) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, size)

    monkeypatch.setattr(snapshot_storage, "allocate", full)
    run, ring = Training(), Snapshots(tmp_path, rank=0, world=1)
    for _ in range(2 * memory_snapshots.AGREE_AFTER):
        take(ring, run)
    assert ring.parts == 1 and ring.held() and not ring.refused
    assert not list(tmp_path.glob("part-*"))


def test_whole_states_are_copied_where_parts_do_not_fit_or_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Training()
    run.advance()
    whole = StateParts(run.shards()).size
    large(monkeypatch, 4.0 * (whole + 1))
    ring = Snapshots(tmp_path, rank=0, world=1)
    take(ring, run)
    assert ring.parts == 1 and ring.held() == [2] and not ring.refused
    large(monkeypatch, room_for(3))
    ring = Snapshots(tmp_path / "slow", rank=0, world=1)
    (tmp_path / "slow").mkdir()
    for _ in range(6):
        take(ring, run)
    assert ring.parts == 3
    ring._steps.extend([0.1] * 8)
    ring._copies.extend([0.1] * 8)  # longer than the 90 % of a step in which a copy is hidden
    ring.agree([ring.preferred_interval()])
    assert ring.parts == 1 and not list((tmp_path / "slow").glob("part-*"))
    run.step = 7
    take(ring, run)
    assert ring.held() == [8] and len(list((tmp_path / "slow").glob("snap-*"))) == 1


def test_several_ranks_copy_whole_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their snapshots are merged and sent to other nodes; parts that a single rank left before are not used."""
    large(monkeypatch, room_for(3))
    run = Training()
    ring = Snapshots(tmp_path, rank=0, world=1)
    for _ in range(6):
        take(ring, run)
    assert Snapshots(tmp_path, rank=0, world=1).held() == ring.held() != []
    several = Snapshots(tmp_path, rank=0, world=2)
    assert several.held() == []
    take(several, run)
    assert several.parts == 1 and several.held() == [7]
    assert not list(tmp_path.glob("part-*"))


def test_parts_are_as_small_as_memory_allows() -> None:
    run = Training()
    run.advance()
    assert run.update is not None
    assert cut_for(run.shards(), run.update, 0) is None
    sizes = []
    for count in range(2, MAX_PARTS + 1):
        if count <= len(SHAPES):
            cut = cut_for(run.shards(), run.update, room_for(count) / 4)
            assert cut is not None and cut.count >= count
            sizes.append(cut.size)
    assert sizes == sorted(sizes, reverse=True)
