"""The queue as data: for `weft queue`, `weft runs` and --json."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from weft.extensions.queue.fair_share import past_usage
from weft.extensions.queue.processes import is_stopped
from weft.extensions.queue.queue_folder import QueueFolder, queue_path, user_name


def queue_state(queue: QueueFolder) -> dict[str, Any]:
    """What the machine has, and every claim: those that hold resources first, then the waiting ones in their order."""
    now = time.time()
    with queue.locked():
        state = queue.read(now)
        past = past_usage(queue.usage, queue.settings, now)
    rows = []
    for claim in state.live:
        waiting = state.schedule.waiting.get(claim.id)
        rows.append(
            {
                "id": claim.id,
                "state": claim.state,
                "user": user_name(claim.uid),
                "name": claim.name,
                "run": claim.run,
                "pid": claim.pid,
                "priority": claim.priority,
                "request": asdict(claim.request),
                "asks_for": str(claim.request),
                "gpus": list(claim.gpus),
                "cores": list(claim.cores),
                "created": claim.created,
                "since": claim.since if claim.held else None,
                "position": waiting.position if waiting else None,
                "reason": waiting.reason if waiting else "stopped" if is_stopped(claim) else "",
            }
        )
    rows.sort(key=lambda row: (row["position"] or 0, row["created"]))
    weights = queue.settings.weights
    used = past | {uid: seconds * weights.get(user_name(uid), 1.0) for uid, seconds in state.usage.items()}
    usage = {user_name(uid): round(seconds / 3600, 4) for uid, seconds in used.items()}
    return {"folder": str(queue.path), "settings": asdict(queue.settings), "claims": rows, "usage_machine_hours": usage}


def claims_of_runs() -> dict[str, dict[str, Any]]:
    """The claims of runs on this machine by run folder; empty if it has no queue."""
    path = queue_path()
    if not (path / "settings.json").exists():
        return {}
    return {row["run"]: row for row in queue_state(QueueFolder(path))["claims"] if row["run"]}
