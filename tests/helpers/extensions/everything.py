"""One file that adds a family with a block of its own, its data, a device, a detector, a launch target and an alert
target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from weft.guards.detectors import DETECTORS, FAULTS, DetectedFault, DetectorKind, FaultKind
from weft.hardware.catalog import DEVICES, Device
from weft.job.model import FAMILIES, Family
from weft.job.watch import ALERT_TARGETS, AlertTarget, AlertTargetKind
from weft.launch.targets.local import LocalTarget
from weft.launch.targets.target_kinds import LAUNCH_TARGETS, TargetKind

WIDTH = 32


class Mixer(nn.Module):
    """Mixes the positions of a sequence, then its features."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.positions, self.features = nn.Linear(length, length), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(x.transpose(1, 2)).transpose(1, 2)
        return x + self.features(x).relu()


class Mixers(nn.Module):
    """[batch, length, dim] -> [batch, length, dim]"""

    def __init__(self, dim: int, layers: int, length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixer(dim, length) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def mixer_args(model: Any, data: Any) -> dict[str, Any]:
    return {"dim": model.dim, "layers": model.layers, "length": data.seq_len}


class Rows:
    """Noise whose first half is the target."""

    train_len, val_len = 64, 8

    def __init__(self, data: Any) -> None:
        self.shape = (data.seq_len, WIDTH)

    def train(self, index: int) -> dict[str, np.ndarray]:
        x = np.random.default_rng(index).standard_normal(self.shape).astype(np.float32)
        return {"inputs": x, "targets": 0.5 * x}

    val = train


class EveryThirdStep:
    """Names a fault in each third step."""

    def look(self, step: Any, rows: Sequence[Any]) -> DetectedFault | None:
        return DetectedFault("third_step", f"step {step.number} is a third one") if step.number % 3 == 0 else None


def every_third_step(job: Any, plan: Any, mesh: Any) -> EveryThirdStep:
    return EveryThirdStep()


class OtherPlace(LocalTarget):
    """Starts runs on this machine under another name."""

    name = "other-place"


def append_line(target: AlertTarget, message: Any) -> None:
    with Path(target.address("notebook")).open("a") as file:
        file.write(json.dumps(message.data()) + "\n")


FAMILIES.register(
    Family(
        "mixer", "Mixers.", f"{__name__}:Mixers", "module", {}, fields=("dim", "layers"),
        args=f"{__name__}:mixer_args",
    )
)  # fmt: skip
DEVICES.register(
    Device(
        "abacus", "cuda", 64.0, {"fp32": 50.0, "bf16": 400.0, "fp16": 400.0, "fp8": None}, 3.0, 300.0, 500.0, 0.8, 100,
        network="ib-hdr",
    )
)  # fmt: skip
FAULTS.register(FaultKind("third_step", "a third step was taken", alert="spike"))
DETECTORS.register(DetectorKind("third-step", f"{__name__}:every_third_step"))
LAUNCH_TARGETS.register(TargetKind("other-place", f"{__name__}:OtherPlace"))
ALERT_TARGETS.register(
    AlertTargetKind("notebook", "a file that gets a line", f"{__name__}:append_line", lambda target: "notebook")
)
