"""WeftStrategy without Lightning, and with a stand-in for its classes; with it, bench/own_code.py compares losses."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import weft.lightning
from weft.job.errors import JobError, MachineError


def stand_in(monkeypatch: pytest.MonkeyPatch, package: str) -> Any:
    """The strategy's module where only this package is installed, with classes that note what is called."""

    class Base:
        called: ClassVar[list[str]] = []

        def __init__(self, **options: Any):
            self.options = options

        def setup(self, trainer: Any) -> None:
            self.called.append("setup")

    for name in (package, f"{package}.plugins", f"{package}.plugins.precision", f"{package}.strategies",
                 f"{package}.trainer", f"{package}.trainer.states"):  # fmt: skip
        module = types.ModuleType(name)
        for attribute in ("Precision", "DDPStrategy", "Trainer", "LightningModule"):
            setattr(module, attribute, type(attribute, (Base,), {}))
        module.TrainerFn = types.SimpleNamespace(FITTING="fit")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "weft.extensions.adapters.lightning_strategy", raising=False)
    strategy = importlib.import_module("weft.extensions.adapters.lightning_strategy")
    monkeypatch.setitem(sys.modules, "weft.extensions.adapters.lightning_strategy", strategy)
    Base.called.clear()
    return strategy


def test_names_are_those_of_the_package_that_a_script_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    strategy = stand_in(monkeypatch, "pytorch_lightning")
    assert strategy.PACKAGE == "pytorch_lightning"
    assert weft.lightning.LightningModule is sys.modules["pytorch_lightning"].LightningModule  # type: ignore[attr-defined]
    trainer = weft.lightning.Trainer(strategy="deepspeed_stage_2", precision="bf16-mixed", devices=2)
    job = trainer.options["strategy"].job
    assert (job.parallel.zero, job.precision, trainer.options["devices"]) == (2, "bf16", 2)
    with pytest.raises(JobError, match="strategy='dp' is not supported; auto, ddp"):
        weft.lightning.Trainer(strategy="dp")


def test_sharded_weights_are_tested_as_fit_left_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDPStrategy.setup would copy whole weights from rank 0."""
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    kind: Any = stand_in(monkeypatch, "pytorch_lightning").WeftStrategy
    plain = torch.nn.Linear(2, 2)
    strategy = kind()
    strategy.lightning_module, strategy.model_to_device = plain, lambda: strategy.called.append("device")
    strategy.accelerator = types.SimpleNamespace(setup=lambda trainer: strategy.called.append("accelerator"))
    trainer = types.SimpleNamespace(state=types.SimpleNamespace(fn="test"))
    strategy.setup(trainer)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain.weight = torch.nn.Parameter(distribute_tensor(plain.weight.detach(), mesh))
        strategy.setup(trainer)
    finally:
        torch.distributed.destroy_process_group()
    assert strategy.called == ["setup", "accelerator", "device"]


def test_strategy_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "weft.extensions.adapters.lightning_strategy", raising=False)
    with pytest.raises(MachineError, match=r"WeftStrategy needs Lightning .*; pip install lightning"):
        _ = weft.lightning.WeftStrategy
    with pytest.raises(AttributeError, match="has no attribute 'WeftStrategies'"):
        _ = weft.lightning.WeftStrategies
