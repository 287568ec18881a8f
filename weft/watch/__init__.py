"""Journal, logs, progress lines and reports of a run."""

from weft.watch.journal import Journal, read_jsonl, read_metrics
from weft.watch.progress import Progress
from weft.watch.report import write_report

__all__ = ["Journal", "Progress", "read_jsonl", "read_metrics", "write_report"]
