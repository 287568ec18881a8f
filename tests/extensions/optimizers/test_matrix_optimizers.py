"""Optimizers agree with torch's or with their papers; batches and skipped steps change no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.extensions.optimizers.matrix_updates import batches
from weft.job import Optim
from weft.job.optim import OPTIMIZERS
from weft.optim.build_optimizers import build_optimizers

SHAPES = {"blocks.0.tall": (24, 6), "blocks.0.wide": (5, 17), "blocks.0.vector": (7,), "embed": (9, 4)}


def weights() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {n: torch.nn.Parameter(torch.randn(s, generator=random) * 0.1) for n, s in SHAPES.items()}


def torch_adafactor(master_params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(master_params, lr=0.01, weight_decay=0.1)


def torch_muon(master_params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(master_params, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")


def torch_sgd(master_params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(master_params, lr=0.01, weight_decay=0.1, momentum=0.9)


@pytest.mark.parametrize("name", [entry.name for entry in OPTIMIZERS])
def test_allocated_states_are_those_before_the_first_step(name: str) -> None:
    made = []
    for allocated in (False, True):
        params = weights()
        optimizer = build_optimizers(Optim(name=name, lr=0.01), params, lambda n: n.startswith("blocks"))
        if allocated:
            optimizer.allocate()
            assert all(torch.equal(params[n], w) for n, w in weights().items())
        random = torch.Generator().manual_seed(1)
        for _ in range(3):
            for n in SHAPES:
                params[n].grad = torch.randn(SHAPES[n], generator=random)
            optimizer.step(0.01)
        made.append(params)
    assert all(torch.equal(made[0][n], made[1][n]) for n in SHAPES)


# torch's Muon multiplies in bf16 on every device, ours only on GPUs
@pytest.mark.parametrize(
    ("name", "make", "tolerance"),
    [("adafactor", torch_adafactor, 1e-5), ("muon", torch_muon, 0.03), ("sgd", torch_sgd, 1e-6)],
)
def test_steps_agree_with_torch(name: str, make: Any, tolerance: float) -> None:
    """Held on the matrices, which all three treat alike; their vectors are not decayed by us."""
    ours, theirs = weights(), weights()
    matrices = [n for n in SHAPES if n.startswith("blocks") and len(SHAPES[n]) == 2]
    optimizer = build_optimizers(Optim(name=name, lr=0.01), ours, lambda n: n.startswith("blocks"))
    reference = make([theirs[n] for n in matrices])
    random = torch.Generator().manual_seed(1)
    start = weights()
    for _ in range(4):
        for n in SHAPES:
            ours[n].grad = torch.randn(SHAPES[n], generator=random)
            theirs[n].grad = ours[n].grad.clone()
        optimizer.step(0.01)
        reference.step()
    for n in matrices:
        way = (theirs[n] - start[n]).norm()
        assert (ours[n] - theirs[n]).norm() < tolerance * way, n
    for n in SHAPES:
        assert not torch.equal(ours[n], start[n])


def lars_step(weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, decay: float) -> None:
    """You et al. 2017, algorithm 1, with momentum as in torch's SGD."""
    ratio = 0.02 * weight.norm() / (grad.norm() + decay * weight.norm()) if weight.dim() > 1 else 1.0
    state["m"] = 0.9 * state.get("m", torch.zeros_like(weight)) + ratio * (grad + decay * weight)
    weight -= 0.01 * state["m"]


def lamb_step(weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, decay: float) -> None:
    """You et al. 2020, algorithm 2."""
    state["m"] = 0.9 * state.get("m", torch.zeros_like(weight)) + 0.1 * grad
    state["v"] = 0.95 * state.get("v", torch.zeros_like(weight)) + 0.05 * grad**2
    update = state["m"] / (1 - 0.9**step) / ((state["v"] / (1 - 0.95**step)).sqrt() + 1e-8) + decay * weight
    weight -= 0.01 * (weight.norm() / update.norm() if weight.dim() > 1 else 1.0) * update


@pytest.mark.parametrize(("name", "one_step"), [("lars", lars_step), ("lamb", lamb_step)])
def test_trust_ratios_are_those_of_the_papers(name: str, one_step: Any) -> None:
    """Vectors have neither ratio nor decay. A step that is skipped changes nothing, also if it is the first."""
    ours, theirs = weights(), {n: w.detach().clone() for n, w in weights().items()}
    optimizer = build_optimizers(Optim(name=name, lr=0.01, trust=0.02), ours, lambda n: n.startswith("blocks"))
    states: dict[str, dict[str, Tensor]] = {n: {} for n in SHAPES}
    random = torch.Generator().manual_seed(1)
    for step in range(5):
        for n, shape in SHAPES.items():
            ours[n].grad = torch.randn(shape, generator=random)
            if step:
                one_step(theirs[n], ours[n].grad.clone(), states[n], step, 0.1 if len(shape) > 1 else 0.0)
            else:
                ours[n].grad.view(-1)[0] = torch.inf
        optimizer.step(0.01, taken=torch.tensor(step > 0))
        for n in SHAPES:
            torch.testing.assert_close(ours[n].detach(), theirs[n], msg=f"{n} in step {step}")


OF_MATRICES = ["adafactor", "muon", "lars", "lamb"]
"""Optimizers that combine the elements of a matrix."""


def stepped(name: str, shapes: dict[str, tuple[int, ...]], steps: int = 3, skipped: int = 0) -> list[Tensor]:
    """Weights and states after some steps, the first of which are skipped for gradients that are not finite."""
    random = torch.Generator().manual_seed(0)
    params = {n: torch.nn.Parameter(torch.randn(s, generator=random)) for n, s in shapes.items()}
    optimizer = build_optimizers(Optim(name=name, lr=0.01), params, lambda n: n.startswith("blocks"))
    part = next(p for p in optimizer.parts if type(p).__name__.lower() == name)
    for step in range(skipped + steps):
        for param in params.values():
            param.grad = (
                torch.full_like(param, torch.nan) if step < skipped else torch.randn(param.shape, generator=random)
            )
        part.found_inf = torch.tensor(float(step < skipped))  # type: ignore[attr-defined]
        part.step()
    return [p.detach() for p in params.values()] + [t for t in optimizer.state().values()]


@pytest.mark.parametrize("name", OF_MATRICES)
def test_batches_and_skipped_steps_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are updated together up to a number of elements; the last batches are of one weight each."""
    shapes = SHAPES | {"blocks.1.wide": (5, 17), "blocks.experts.w": (3, 4, 6)}
    right = stepped(name, shapes)
    assert all(torch.isfinite(t).all() for t in right)
    assert all(map(torch.equal, stepped(name, shapes, skipped=2), right))
    module = f"weft.extensions.optimizers.{'trust_ratio' if name in ('lars', 'lamb') else name}"
    monkeypatch.setattr(f"{module}.batches", lambda sizes, *_, **__: batches(sizes, 100))
    assert all(map(torch.equal, stepped(name, shapes), right))


def test_batches() -> None:
    assert batches([5, 5, 1, 20, 3], 10) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert batches([5, 5, 1, 20, 3], 10, least=2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert batches([]) == []


def test_matrices_of_a_shape_are_orthogonalised_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is filled with zeros."""
    shapes = {f"blocks.{i}": (6, 9) if i % 2 else (9, 4) for i in range(9)} | {"blocks.experts.w": (3, 6, 9)}
    right = stepped("muon", shapes)
    monkeypatch.setattr("weft.extensions.optimizers.muon.batch_size", lambda shape, device: 4)
    for ours, theirs in zip(stepped("muon", shapes), right, strict=True):
        torch.testing.assert_close(ours, theirs)


class Operations(TorchDispatchMode):
    """Counts operations; one on a list of tensors is one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "limit"), [("adafactor", 10), ("muon", 4), ("lars", 4), ("lamb", 5)])
def test_a_further_matrix_adds_few_operations(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an operation for each scalar and each product, a GPU would wait for the host."""
    monkeypatch.setattr("weft.extensions.optimizers.muon.batch_size", lambda shape, device: 64, raising=False)
    counts = []
    for number in (8, 40):
        params = {f"blocks.{i}": torch.nn.Parameter(torch.randn(4, 6)) for i in range(number)}
        [part] = build_optimizers(Optim(name=name), params, lambda _: True).parts
        for param in params.values():
            param.grad = torch.randn_like(param)
        part.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        part.step()
        with Operations() as counted:
            part.step()
        counts.append(counted.count)
    assert counts[1] - counts[0] <= 32 * limit, counts


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_vectors_do_not_decay_and_allocate_changes_no_weight(name: str) -> None:
    master_params = weights()
    before = {n: m.detach().clone() for n, m in master_params.items()}
    optimizer = build_optimizers(Optim(name=name, lr=0.5), master_params, lambda n: n.startswith("blocks"))
    optimizer.allocate()
    assert all(torch.equal(master_params[n], before[n]) for n in master_params)
    assert {key.rsplit(".", 1)[0] for key in optimizer.state()} == set(master_params)
    for master in master_params.values():
        master.grad = torch.zeros_like(master)
    optimizer.step(0.5)
    for n in master_params:
        expected = before[n] * (0.95 if len(SHAPES[n]) == 2 else 1.0)
        torch.testing.assert_close(master_params[n].detach(), expected, msg=n)
