"""The space: every layout that a job could have on a cluster, enumerated with exact divisibility."""

from __future__ import annotations

from weft.plan.layouts import (
    COMPRESSIONS,
    CP_STYLES,
    OFFLOADS,
    PLACEMENTS,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULE_NAMES,
    Layouts,
)  # fmt: skip

__all__ = [
    "COMPRESSIONS", "CP_STYLES", "OFFLOADS", "PLACEMENTS", "PRECISIONS", "RECOMPUTES", "SCHEDULE_NAMES", "Layouts",
]  # fmt: skip
