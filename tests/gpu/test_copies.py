"""Copies between device and host beside computation: offloaded activations, pinned batches, snapshots."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weft.checkpoint import memory_snapshots, state_parts
from weft.checkpoint.memory_snapshots import Snapshots
from weft.data.loader import Loader, to_device
from weft.data.synthetic import RandomTokens
from weft.job.schema import Optim
from weft.memory import HostOffload
from weft.optim.build_optimizers import Optimizers, build_optimizers

DEVICE = torch.device("cuda")


def busy() -> Tensor:
    """Work that keeps the compute stream occupied for some milliseconds."""
    a = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(20):
        a = a @ a * 1e-3
    return a


def test_offloaded_tensors_return_unchanged_beside_computation() -> None:
    """Sources are overwritten and freed right after put(), while the copy may still wait for the compute stream."""
    offload = HostOffload(DEVICE, 1.0)
    for step in range(5):
        entries, wanted = [], []
        for i in range(8):
            value = busy()[:512, : 64 * (i + 1)] * 0 + (100 * step + i)
            wanted.append((value.shape, 100 * step + i))
            log = torch.full((i + 1,), float("-inf"), device=DEVICE)
            entries.append(offload.put([value.bfloat16(), log]))
            value.fill_(-1.0)
            del value
            torch.empty(512, 64 * (i + 1), device=DEVICE, dtype=torch.bfloat16).fill_(-2.0)  # reuses freed memory
        for entry, (shape, number) in reversed(list(zip(entries, wanted, strict=True))):
            back, log = offload.get(entry)
            busy()
            assert back.shape == shape and bool((back == torch.tensor(float(number)).bfloat16().item()).all())
            assert bool((log == float("-inf")).all())
        assert offload.last is None


def test_offload_keeps_to_its_limit() -> None:
    offload = HostOffload(DEVICE, 3 * 4096 * 4 / 2**30)
    made = [torch.full((64, 64), float(i), device=DEVICE) for i in range(5)]
    entries = [offload.put([t]) for t in made]
    assert [bool(e.there) for e in entries] == [True] * 3 + [False] * 2
    assert all(e.there[0].is_pinned() for e in entries[:3])
    for value, entry in reversed(list(zip(made, entries, strict=True))):
        assert torch.equal(offload.get(entry)[0], value)


def test_pinned_batches() -> None:
    """Batches are pinned, copied without waiting, and arrive unchanged although the loader reads ahead."""
    with Loader(
        RandomTokens(0, 256, 1000, False), seed=0, global_batch=16, microbatch=4, dp_rank=0, dp_size=1, pin=True
    ) as pinned, Loader(
        RandomTokens(0, 256, 1000, False), seed=0, global_batch=16, microbatch=4, dp_rank=0, dp_size=1
    ) as plain:  # fmt: skip
        for _ in range(20):
            for a, b in zip(next(pinned), next(plain), strict=True):
                assert all(t.is_pinned() for t in a.values())
                work = busy()
                there = to_device(a, DEVICE)
                del a
                assert all(torch.equal(there[key].cpu(), b[key]) for key in b)
                del work


@pytest.mark.parametrize("in_files", [True, False])
def test_snapshots_are_of_one_moment(tmp_path: Path, in_files: bool) -> None:
    """A snapshot taken beside the next step holds the state of its own step, however soon the weights change."""
    snapshots = Snapshots(tmp_path if in_files else None, 0, device=DEVICE)
    state = {"a": torch.zeros(1 << 20, device=DEVICE), "b": torch.zeros(333, dtype=torch.bfloat16, device=DEVICE)}
    held: list[int] = []
    for step in range(1, 200):
        busy()
        snapshots.settle()  # as the training step does before it updates the weights
        for tensor in state.values():
            tensor.fill_(float(step % 128))
        snapshots.take(step, state, {"step": step})
        snapshots.seal(step, {"sealed": step})
        held = snapshots.held()
        if held and held[-1] == step and step > 20:
            break
        time.sleep(0.01)  # the ring is allocated in the background
    assert held, snapshots.refused
    busy()
    snapshots.settle()
    for tensor in state.values():
        tensor.fill_(-1.0)
    meta = snapshots.load(held[-1], state)
    torch.cuda.synchronize()
    assert meta["sealed"] == held[-1]
    assert all(bool((tensor == float(held[-1] % 128)).all()) for tensor in state.values())


@pytest.mark.parametrize("parts", [2, 3])
def test_a_state_in_parts_is_restored_by_repeated_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """The gradients of a step are copied although the next one frees and overwrites their memory at once."""
    shapes = [(512, 512), (512,), (1000, 333), (64,), (333, 1000), (2048, 512), (4096, 12000)]

    def build() -> tuple[Optimizers, dict[str, Tensor]]:
        torch.manual_seed(0)
        masters = {f"w{i}": torch.randn(shape, device=DEVICE) for i, shape in enumerate(shapes)}
        compute: dict[str, Tensor] = {n: torch.nn.Parameter(m.bfloat16()) for n, m in masters.items()}
        made = build_optimizers(Optim(name="adamw"), masters, lambda name: False, compute, compute)
        made.allocate()
        return made, compute

    def shards(of: Optimizers) -> dict[str, Tensor]:
        out = {f"model.{n}": m for n, m in of.masters().items()}
        return out | {f"optim.{n}": t for n, t in of.shards().items()}

    monkeypatch.setattr(memory_snapshots, "LARGE_RING_BYTES", {"cuda": 1000, "cpu": 1000})
    monkeypatch.setattr(state_parts, "MAX_PARTS", parts)
    optimizers, compute = build()
    ring = Snapshots(tmp_path, 0, device=DEVICE, world=1)
    expected = dict[str, Tensor]()
    for step in range(1, 400):
        noise = torch.Generator(DEVICE).manual_seed(step)
        for weight in compute.values():
            weight.grad = None
        busy()
        for weight in compute.values():  # most probably in the memory of the last step's
            weight.grad = torch.randn(weight.shape, device=DEVICE, generator=noise).bfloat16()
        ring.settle()
        taken = torch.tensor(step % 7 != 0, device=DEVICE)
        optimizers.step(1e-2 / step, torch.rand((), device=DEVICE, generator=noise), taken)
        expected = {n: t.clone() for n, t in shards(optimizers).items()}
        if ring.tick(step):
            ring.agree([1])
        update = optimizers.last_update()
        assert update is not None
        ring.take(step, shards(optimizers), {"step": step}, update)
        ring.seal(step, {})
        if len(ring.held()) == 2 and step > 20 and step % 7:  # taken
            break
        time.sleep(0.01)
    assert ring.parts == parts and ring.held()[-1] == step
    fresh, again = build()
    found = Snapshots(tmp_path, 0, device=DEVICE, world=1)
    assert found.holds(shards(fresh))
    found.load(step, shards(fresh), fresh.repeat)
    torch.cuda.synchronize()
    assert all(torch.equal(t, expected[n]) for n, t in shards(fresh).items())
    assert any(torch.equal(again[n], compute[n]) for n in again)  # those that were updated again
