"""The known trackers."""

from __future__ import annotations

from weft.job.watch import TRACKERS, TrackerKind

PACKAGE = "weft.watch.trackers"

for kind in (
    TrackerKind("tensorboard", "event files in RUN/tensorboard", "tensorboard", f"{PACKAGE}.tensorboard:TensorBoard"),
    TrackerKind("wandb", "Weights & Biases; offline without an API key", "wandb", f"{PACKAGE}.wandb:Wandb"),
    TrackerKind("mlflow", "MLFLOW_TRACKING_URI, or RUNS/mlruns", "mlflow", f"{PACKAGE}.mlflow:Mlflow"),
    TrackerKind("trackio", "its own local store, TRACKIO_DIR", "trackio", f"{PACKAGE}.trackio:Trackio"),
):
    TRACKERS.register(kind)
