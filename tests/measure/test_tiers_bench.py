"""`weft bench tiers` measures each link of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_links_and_disk(tmp_path: Path, in_process: Callable[..., Any]) -> None:
    done = in_process(tmp_path, "bench", "tiers", "--mib", "2", "--seconds", "0.01", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["bytes"] == 2 * 2**20 and found["disk"]["folder"] == str(tmp_path)
    assert all(rate > 0 for rate in found["links"].values())
    assert found["disk"]["write_gb_s"] > 0 and found["disk"]["read_gb_s"] > 0
    assert list(tmp_path.iterdir()) == []
    missing = in_process(tmp_path, "bench", "tiers", "--disk", "nowhere")
    assert missing.code == 4 and "--disk nowhere is not a folder" in missing.err
