"""`weft bench power`: what it computes, and mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Output, write_job

from weft.extensions.energy import power_sweep as power
from weft.job import JobError
from weft.job.errors import Exit

JOB: dict[str, Any] = {
    "name": "small",
    "model": {"dim": 32, "layers": 2, "heads": 2, "ffn": 64},
    "data": {"seq_len": 32},
    "train": {"steps": 2, "global_batch": 8},
    "cluster": {"device": "cpu"},
    "parallel": {"dp_shard": -1},
}


def test_power(tmp_path: Path, in_process: Callable[..., Output], monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(tmp_path, **JOB)
    result = in_process(tmp_path, "train", "job.yaml", "watch.power_cap_w=300")
    assert result.code == Exit.JOB and "watch.power_cap_w=300 limits GPUs" in result.err
    monkeypatch.setattr(power, "probe", lambda: type("Machine", (), {"gpus": ()}))
    result = in_process(tmp_path, "bench", "power", "job.yaml")
    assert result.code == Exit.MACHINE and "needs an NVIDIA GPU" in result.err

    class Gpu:
        def limits_w(self) -> tuple[float, float]:
            return 200.0, 700.0

    gpu: Any = Gpu()
    assert power.parse_caps(None, gpu) == [700, 595, 490, 385, 280] and power.parse_caps("300,700", gpu) == [700, 300]
    for text in ("a", "", "100", "800,300"):
        with pytest.raises(JobError, match="--caps"):
            power.parse_caps(text, gpu)
    rows = [
        {"cap_w": 700.0, "power_w": 600.0, "tokens_per_s": 100.0, "tokens_per_joule": 1 / 6},
        {"cap_w": 350.0, "power_w": 300.0, "tokens_per_s": 80.0, "tokens_per_joule": 80 / 300},
    ]
    lines = power.show({"rows": power.with_ratios(rows)}).splitlines()
    assert lines[2].split() == ["350", "W", "300", "W", "80", "80%", "0.2667", "160%"]
