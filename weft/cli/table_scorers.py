"""What `weft estimate --table` uses: scores of the estimates against measured runs."""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.registry import Registry


@dataclass(frozen=True)
class TableScorer:
    """Scores the estimates against a table of measured runs. Functions are named as `module:function`."""

    name: str
    score: str
    """From (path, whether to fit sources without a calibration, name of a calibration or None) to the scores."""
    show: str
    """From the scores to text."""


TABLE_SCORERS: Registry[TableScorer] = Registry("estimate --table", __name__)
