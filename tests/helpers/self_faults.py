"""A rank that kills or stops itself, or kills its supervisor, at the steps of WEFT_FAULTS.

A test that did so from another process would come too late on a busy machine. `memory.txt` beside the orders gets the
path of the run's folder in shared memory.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.training import rank, supervised_rank

if TYPE_CHECKING:
    import torch

    from weft.training.session import Session


def write_orders(folder: Path, *orders: Mapping[str, Any]) -> dict[str, str]:
    """Write the orders: kind, rank and step of each. Returns the environment variables of the run."""
    path = folder / "orders.json"
    base = {"phase": "backward", "moment": 0.5}
    path.write_text(json.dumps([{**base, "id": i, **order} for i, order in enumerate(orders)]), encoding="utf-8")
    return {"WEFT_FAULTS": str(path), "WEFT_RANK_MODULE": "helpers.self_faults"}


def memory_of(folder: Path) -> Path:
    """The folder in shared memory of a run that was started with these orders."""
    return Path((folder / "memory.txt").read_text(encoding="utf-8"))


def _send(number: signal.Signals) -> Any:
    return lambda device: os.kill(os.getpid(), number)


def _kill_supervisor(device: torch.device) -> None:
    from weft.supervisor.status_board import StatusBoard

    os.kill(StatusBoard(Path(os.environ["WEFT_MEMORY"]) / "board")["supervisor"], signal.SIGKILL)


def inject(session: Session) -> None:
    """Add the faults of the orders to this session."""
    from weft.chaos.rank_faults import ACTIONS, VARIABLE, arm

    ACTIONS |= {"kill": _send(signal.SIGKILL), "stop": _send(signal.SIGSTOP), "supervisor": _kill_supervisor}
    Path(os.environ[VARIABLE]).with_name("memory.txt").write_text(os.environ["WEFT_MEMORY"], encoding="utf-8")
    arm(session)


if __name__ == "__main__":
    rank.exit_process(supervised_rank.main(inject))
