"""Garbage collection around training."""

from __future__ import annotations

import gc

import pytest

from weft.training.garbage_collection import GarbageCollection


def test_imports_stay_frozen_after_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that joins the next attempt collects the objects of the former one, not those of all imported modules."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with GarbageCollection() as collection:
        assert not gc.isenabled()
        collection.after_step(100)
    assert gc.isenabled() and calls == []
