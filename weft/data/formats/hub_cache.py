"""The local cache of the Hugging Face hub. Nothing is downloaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hf_home() -> Path:
    """The folder of all caches of Hugging Face's libraries."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser()


def hub_cache() -> Path:
    """The folder of cached repositories."""
    return Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub").expanduser()


def cached_snapshot(kind: str, name: str, is_usable: Callable[[Path], bool]) -> Path | None:
    """The usable snapshot that the main branch of a cached repository refers to, else its newest one. `kind` is models
    or datasets."""
    snapshots = hub_cache() / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    reference = snapshots.parent / "refs" / "main"
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8").strip()
        if re.fullmatch(r"[0-9a-f]{7,64}", commit) and is_usable(snapshots / commit):
            return snapshots / commit
    found = [p for p in snapshots.glob("*") if is_usable(p)]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)
