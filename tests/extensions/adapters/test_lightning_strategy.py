"""WeftStrategy where Lightning is not installed; with it, bench/own_code.py compares its losses with ddp's."""

from __future__ import annotations

import sys

import pytest

import weft.lightning
from weft.job.errors import MachineError


def test_strategy_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "weft.extensions.adapters.lightning_strategy", raising=False)
    with pytest.raises(MachineError, match=r"WeftStrategy needs Lightning .*; pip install lightning"):
        _ = weft.lightning.WeftStrategy
    with pytest.raises(AttributeError, match="has no attribute 'WeftStrategies'"):
        _ = weft.lightning.WeftStrategies
