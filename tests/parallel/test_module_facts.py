"""Predicted memory, traffic and time of a person's own module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.parity import make_job
from torch import Tensor, nn

import weft
from weft.extensions.vision import idx_files
from weft.job.errors import JobError
from weft.job.schema import Job

DIM, LAYERS = 64, 8


class Stack(nn.Module):
    """Layers whose inputs are kept; a given number of the first are frozen."""

    def __init__(self, frozen: int = 0):
        super().__init__()
        self.embed = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 256, bias=False)
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


class ReadsValues(Stack):
    """Needs the values of its inputs, which a trace does not have."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * float(inputs.max() >= 0)


class Pairless(Stack):
    """What is between its layers needs all values."""

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for layer in self.layers:
            x = layer(x).softmax(-1)
        return self.head(x)


class WrongSizes(Stack):
    """Adds tensors whose sizes differ."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.embed(inputs)


class Untrained(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Lazy(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(256)  # type: ignore[assignment]


class Complex(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(DIM, dtype=torch.complex64))


class Scalar(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


NOT_OURS: dict[str, Any] = dict.fromkeys(("family", "dim", "layers", "heads", "kv_heads", "ffn", "vocab"))


def job(name: str, *overrides: str, **args: Any) -> Job:
    model = {**NOT_OURS, "module": f"test_module_facts:{name}", "args": args}
    return make_job("train.accumulation=auto", *overrides, model=model, data={"source": "pydoc", "seq_len": 16})


def test_states_activations_and_traffic() -> None:
    weights = 2 * 256 * DIM + LAYERS * DIM**2
    found = weft.plan(job("Stack"), 2).predicted
    assert found["states_gib"] * 2**30 == pytest.approx(16 * weights, rel=1e-4), "weights, gradients and two moments"
    assert found["communication_mib"] * 2**20 == 4 * weights
    tokens = 4 * 16  # of a microbatch
    kept = 4 * tokens * (LAYERS + 1) * DIM
    logits = 4 * tokens * 256
    assert kept + logits < found["activations_gib"] * 2**30 < 1.2 * kept + 5 * logits
    assert "step_time_s" not in found, "the peak of a CPU is not known"
    frozen = weft.plan(job("Stack", frozen=LAYERS), 2).predicted
    assert frozen["states_gib"] * 2**30 == pytest.approx(16 * 2 * 256 * DIM + 4 * LAYERS * DIM**2, rel=1e-4)
    cut = weft.plan(job("Stack", "parallel={dp_replicate: 1, dp_shard: 2, zero: 3}"), 2).predicted
    assert cut["states_gib"] == pytest.approx(found["states_gib"] / 2, rel=1e-3)
    assert 0 < cut["gathered_gib"] * 2**30 < 4 * weights


def test_step_time_on_a_device_of_the_catalog() -> None:
    slow, fast = (
        weft.plan(job("Stack", f"cluster.device={d}", "precision=bf16"), 8).predicted for d in ("v100", "h100-sxm")
    )
    assert 0 < fast["step_time_s"] <= slow["step_time_s"] < 1 and 0 < fast["mfu"] < 1


def test_more_memory_than_the_device_has_is_reported() -> None:
    settings = ("cluster.device=t4", "cluster.memory_gib=0.0001", "precision=fp16", "cluster.devices_per_node=2")
    assert weft.plan(job("Stack", *settings), 2).reasons[-1].startswith("t4 has 0.0 GiB, and more is predicted")


@pytest.mark.parametrize("name", ["ReadsValues", "WrongSizes"])
def test_a_module_that_cannot_be_traced_is_planned_without(name: str, caplog: pytest.LogCaptureFixture) -> None:
    found = weft.plan(job(name), 2)
    assert found.predicted == {} and "memory and time are not predicted: " in found.reasons[-1]
    assert not caplog.records, "torch prints the failure of an operator too"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.module=test_module_facts:Nothing", "test_module_facts has no 'Nothing'"),
        ("model.module=nowhere:Nothing", "cannot import nowhere"),
        ("model.args={nothing: 1}", "model.args does not fit"),
        ("data.source=test_module_facts:Nothing", "has no function or class 'Nothing'"),
        ("model.module=test_module_facts:Untrained", "Untrained has no weights to train; all of them are frozen"),
        ("model.module=test_module_facts:Lazy", "Lazy has a lazy layer, and the size of head.weight is not known"),
        ("model.module=test_module_facts:Complex", r"Complex has complex weights \(phase\)"),
        ("model.module=test_module_facts:Scalar; parallel.dp_shard=2", "parameter scale has no dimension to cut"),
        (
            "model.module=test_module_facts:Pairless; parallel={tp: 2}",
            "Pairless has no table of parts, and no two linear layers",
        ),
        ("model.module=test_module_facts:ReadsValues; parallel={pp: 2}", "cannot be cut into pipeline stages"),
        (
            "parallel={pp: 2, virtual_stages: 8, schedule: interleaved-1f1b}; train.accumulation=2",
            "has 10 parts with weights .* makes 16 stages",
        ),
    ],
)
def test_what_a_run_would_refuse_is_refused_by_its_plan(change: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        weft.plan(job("Stack", *change.split("; ")), 2)


def test_a_plan_is_made_where_the_data_is_not() -> None:
    found = weft.plan(job("Stack", "data.source=/nowhere/images", "data.images={size: 8}"), 2)
    assert "not predicted: data.source /nowhere/images does not exist" in found.reasons[-1]


def test_a_plan_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(idx_files, "PLACES", dict.fromkeys(idx_files.PLACES, ()))
    found = weft.plan(weft.load_job("mnist-cnn", []), 2)
    assert found.reasons[-1].endswith(
        "not predicted: the data is not on this machine, and only weft train downloads it"
    )
