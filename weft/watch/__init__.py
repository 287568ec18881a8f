"""Journal, logs, progress lines, sinks and reports of a run."""
