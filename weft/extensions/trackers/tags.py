"""Names of metrics in trackers, in the groups train, val and system, and which of them are sent by default."""

from __future__ import annotations

SYSTEM = (
    "step_time_s", "tokens_per_s", "mfu", "peak_memory_gib", "ranks", "comm_", "exposed_", "link_", "bubble", "power_",
    "energy_", "co2_", "cost_", "tokens_per_joule", "gpu_", "cpu_", "disk_", "net_", "throttled_", "tiers", "host_",
)  # fmt: skip
"""How the keys of the group system begin."""
MAIN_SYSTEM = ("system/step_time_s", "system/tokens_per_s", "system/mfu", "system/peak_memory_gib")
DETAILS = (
    "train/tokens", "train/skipped", "train/replica_grad_norm", "train/grad_noise_scale", "train/loss_scale",
    "train/experts/",
)  # fmt: skip
"""How the names begin that are sent only with `watch.tracker_metrics: all`, besides those of the group system."""


def tag_of(key: str) -> str:
    """The name of a record's figure, whose parts have dots: `train/loss`, `val/accuracy`, `system/ranks/busy_s`."""
    if key.startswith("val_"):
        return "val/" + key.removeprefix("val_")
    group = "system" if key.startswith(SYSTEM) else "train"
    return f"{group}/{key.replace('.', '/')}"


def is_main(tag: str) -> bool:
    """Whether a metric is sent by default: losses and figures of the model, speed and memory."""
    return tag in MAIN_SYSTEM or not tag.startswith(("system/", *DETAILS))
