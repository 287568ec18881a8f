"""The registered targets, and the clusters that a person has described in ~/.config/weft/clusters.yaml."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from weft.job.errors import JobError
from weft.job.files.text_file import read_small_text
from weft.job.import_by_name import find_object
from weft.job.load import read_yaml
from weft.launch.targets.target import Target
from weft.launch.targets.target_kinds import LAUNCH_TARGETS


def find_target(name: str) -> Target:
    """The registered target of this name."""
    if name not in LAUNCH_TARGETS:
        raise JobError(f"unknown target {name!r}; targets: {', '.join(LAUNCH_TARGETS.names())}")
    target: Target = find_object(LAUNCH_TARGETS[name].build, "cluster.target")()
    return target


def clusters_file() -> Path:
    """The file with the user's clusters: WEFT_CLUSTERS, or weft/clusters.yaml in XDG_CONFIG_HOME (~/.config)."""
    if given := os.environ.get("WEFT_CLUSTERS"):
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "weft" / "clusters.yaml"


def clusters() -> dict[str, dict[str, Any]]:
    """The entries of the clusters file: by name, the fields of a `cluster` section."""
    path = clusters_file()
    if not os.path.lexists(path):
        return {}
    found = read_yaml(read_small_text(path), str(path))
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        raise JobError(f"{path} must hold clusters by name, each with fields of `cluster:` such as `target: slurm`")
    return {str(name): fields for name, fields in found.items()}


def resolve_target(name: str | None, cluster: dict[str, Any]) -> tuple[Target, dict[str, Any]]:
    """The target that --on names, and the `cluster` section with the fields of a cluster of the file.

    The fields that the job itself sets take precedence over those of the file.
    """
    asked = name or cluster.get("target")
    if not asked or not isinstance(asked, str):
        raise JobError(f"give --on TARGET, or set cluster.target; targets: {', '.join(LAUNCH_TARGETS.names())}")
    if asked in LAUNCH_TARGETS:
        return find_target(asked), {**cluster, "target": asked}
    known = clusters()
    if asked not in known:
        near = difflib.get_close_matches(asked, [*LAUNCH_TARGETS.names(), *known], n=1)
        hint = f"did you mean {near[0]}?" if near else f"targets: {', '.join(LAUNCH_TARGETS.names())}"
        own = f"; clusters of {clusters_file()}: {', '.join(known) or 'none'}"
        raise JobError(f"no target and no cluster is named {asked!r}; {hint}{own}")
    entry = known[asked]
    if not isinstance(entry.get("target"), str) or entry["target"] not in LAUNCH_TARGETS:
        raise JobError(f"{clusters_file()}: {asked}.target must be one of {', '.join(LAUNCH_TARGETS.names())}")
    return find_target(str(entry["target"])), {**entry, **cluster, "target": entry["target"]}
