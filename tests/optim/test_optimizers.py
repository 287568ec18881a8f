"""Schedules, scaled rates, moving average, gradients of another dtype."""

from __future__ import annotations

from typing import Any

import torch

from weft.job import Job, Optim, Train
from weft.optim.build_optimizers import build_optimizers
from weft.optim.ema import Ema
from weft.optim.schedule import learning_rate, peak_lr
from weft.planner.lr_scaling import lr_scaling


def test_schedules() -> None:
    def rates(schedule: str, **optim: Any) -> list[float]:
        job = Job(train=Train(steps=10), optim=Optim(lr=1.0, schedule=schedule, min_lr=0.1, **optim))
        return [round(learning_rate(job, step), 6) for step in range(1, 11)]

    assert rates("constant", warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]
    assert rates("constant", warmup=0.2) == [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert rates("linear", warmup=1)[-2:] == [0.2, 0.1]
    assert rates("wsd", warmup=0, decay=0.2) == [1, 1, 1, 1, 1, 1, 1, 1, 0.55, 0.1]
    cosine = rates("cosine", warmup=0)
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[-1] == 0.1
    assert cosine[4] == 0.55


def test_scaled_peak_rates_are_explained() -> None:
    job = Job(train=Train(global_batch=1024), optim=Optim(lr=1e-3, scale_lr="sqrt", base_batch=256))
    assert peak_lr(job) == (2e-3, "lr 0.001 × 2 = 0.002: sqrt scaling from batch 256 to 1024")
    job = Job(train=Train(global_batch=64), optim=Optim(lr=1e-3, scale_lr="linear", base_batch=256))
    assert peak_lr(job)[0] == 2.5e-4
    assert peak_lr(Job())[1] is None
    lars = Optim(name="lars", lr=1.0, scale_lr="lars", base_batch=256, warmup=0.05)
    job = Job(train=Train(global_batch=1024, steps=100), optim=lars)
    assert peak_lr(job) == (
        2.0, "lr 1 × 2 = 2: lars scaling from batch 256 to 1024; warm-up 0.05 → 0.2 of the steps"
    )  # fmt: skip
    assert learning_rate(job, 10) == 1.0 and learning_rate(job, 20) == 2.0
    assert str(lr_scaling(lars.model_copy(update={"warmup": 30}), 1024)).endswith("warm-up of 30 steps as before')")


def test_moving_average() -> None:
    master_params = {"w": torch.zeros(3)}
    ema = Ema(master_params, 0.75)
    master_params["w"] += 1
    ema.update()
    ema.update()
    torch.testing.assert_close(ema.averages["w"], torch.full((3,), 0.4375))
    assert Ema(master_params, 0.0).averages == {}


def test_gradients_of_another_dtype_update_master_and_compute_params() -> None:
    master_params = {"blocks.w": torch.randn(8, 4), "norm": torch.randn(4)}
    theirs = {n: m.clone().requires_grad_() for n, m in master_params.items()}
    compute_params = {n: m.bfloat16().requires_grad_() for n, m in master_params.items()}
    ours = build_optimizers(
        Optim(lr=0.1), master_params, lambda n: True, grad_params=compute_params, compute_params=compute_params
    )
    right = build_optimizers(Optim(lr=0.1), theirs, lambda n: True)
    for _ in range(3):
        for name, copy in compute_params.items():
            copy.grad = torch.randn_like(copy)
            theirs[name].grad = copy.grad.float() * 0.5
        ours.step(0.1, torch.tensor(0.5))
        right.step(0.1)
    for name, master in master_params.items():
        torch.testing.assert_close(master, theirs[name].detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(compute_params[name], master.bfloat16())
        assert master.grad is None
