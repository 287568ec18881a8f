"""Metrics of a run for Prometheus: a port to scrape, or a file for node_exporter.

Registers the sink that watch.prometheus asks for.
"""

from weft.watch.sinks import SINKS, SinkKind

SINKS.register(
    SinkKind("prometheus", lambda job: job.watch.prometheus is not None, f"{__name__}.metrics:prometheus_sinks")
)
