"""Modules with Lightning's methods train under weft.lightning.fit as in a plain loop; Lightning is not needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import own_loops
from helpers.own_loops import LitModule

import weft.lightning
from weft.job.errors import JobError

Ranks = Callable[[int], Callable[..., list[Any]]]


def plain() -> tuple[list[float], float]:
    """Losses of two epochs, and the loss after them."""
    model = own_loops.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    inputs, targets = own_loops.data().tensors
    for epoch in range(2):
        for i in range(0, 32, 8):
            loss = torch.nn.functional.cross_entropy(model(inputs[i : i + 8]), targets[i : i + 8])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 ** (epoch + 1)
    with torch.no_grad():
        return losses, torch.nn.functional.cross_entropy(model(inputs), targets).item()


@pytest.mark.parametrize("parallel", [{}, {"dp_shard": 2, "zero": 3}], ids=["replicas", "zero 3"])
def test_a_module_trains_as_one_process(tmp_path: Path, world: Ranks, parallel: dict[str, Any]) -> None:
    losses, validated = plain()
    found = world(2)(own_loops.lightning_values, parallel, str(tmp_path))[0]
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["val_loss"] == pytest.approx(validated, rel=1e-5)
    assert found["hooks"] == ["start", "epoch 0", "epoch 1", "end"]
    assert (tmp_path / "fit" / "metrics.jsonl").read_text().count("\n") == 8
    continued = world(1)(own_loops.lightning_values, {}, str(tmp_path), True)[0]
    assert continued["step"] == 12


def test_early_stopping_ends_the_run(tmp_path: Path) -> None:
    class EarlyStopping:
        monitor, patience, mode, min_delta = "val_loss", 1, "min", 10.0

    loops = weft.lightning.fit(
        LitModule(),
        own_loops.LitData(),
        own_loops.fit_job({}, str(tmp_path)),
        callbacks=[EarlyStopping()],
        max_epochs=9,
    )
    assert loops.current_epoch == 2


def test_data_loaders_stand_where_trainer_fit_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = own_loops.LitData()
    loops = weft.lightning.fit(LitModule(), data.train_dataloader(), data.val_dataloader(), max_epochs=1)
    assert len(loops.losses) == 4 and "val_loss" in loops.callback_metrics


def test_whole_weights_are_loaded_into_shards(world: Ranks) -> None:
    same, error = world(2)(own_loops.whole_weights_loaded)[0]
    assert same and "differ in 0.bias, 2.bias, 2.weight" in error


def test_what_is_not_supported_is_named_before_the_start() -> None:
    class Manual(LitModule):
        automatic_optimization = False

    class OwnStep(LitModule):
        def optimizer_step(self, *args: Any) -> None: ...

    class Two(LitModule):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]

    class StochasticWeightAveraging:
        pass

    StochasticWeightAveraging.__module__ = "lightning.pytorch.callbacks"
    with pytest.raises(JobError, match="automatic_optimization"):
        weft.lightning.fit(Manual(), own_loops.LitData())
    with pytest.raises(JobError, match=r"OwnStep\.optimizer_step"):
        weft.lightning.fit(OwnStep(), own_loops.LitData())
    with pytest.raises(JobError, match="2 optimizers"):
        weft.lightning.fit(Two(), own_loops.LitData())
    with pytest.raises(JobError, match="StochasticWeightAveraging"):
        weft.lightning.fit(LitModule(), own_loops.LitData(), callbacks=[StochasticWeightAveraging()])
    with pytest.raises(JobError, match="needs a datamodule"):
        weft.lightning.fit(LitModule())
    with pytest.raises(JobError, match="no training_step"):
        weft.lightning.fit(own_loops.net(), own_loops.LitData())
