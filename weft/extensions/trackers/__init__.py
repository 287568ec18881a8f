"""Experiment trackers: one adapter each, fed from a run's files.

Registers the trackers tensorboard, wandb, mlflow and trackio, and the sink that feeds them.
"""

from weft.job.watch import TRACKERS, TrackerKind
from weft.watch.sinks import SINKS, SinkKind

PACKAGE = __name__
EXPORT = f"{PACKAGE}.sink:export_to_tracker"

for kind in (
    TrackerKind(
        "tensorboard", "event files in RUN/tensorboard", "tensorboard", f"{PACKAGE}.tensorboard:TensorBoard", EXPORT
    ),
    TrackerKind("wandb", "Weights & Biases; offline without an API key", "wandb", f"{PACKAGE}.wandb:Wandb", EXPORT),
    TrackerKind("mlflow", "MLFLOW_TRACKING_URI, or RUNS/mlruns", "mlflow", f"{PACKAGE}.mlflow:Mlflow", EXPORT),
    TrackerKind("trackio", "its own local store, TRACKIO_DIR", "trackio", f"{PACKAGE}.trackio:Trackio", EXPORT),
):
    TRACKERS.register(kind)
SINKS.register(SinkKind("trackers", lambda job: bool(job.watch.trackers), f"{PACKAGE}.sink:tracker_sinks"))
