"""Where `weft launch` can start runs, one entry a target."""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.registry import Registry


@dataclass(frozen=True)
class TargetKind:
    """A place where `weft launch` starts runs."""

    name: str
    build: str
    """`module:class` of its Target, imported when it is used."""


LAUNCH_TARGETS: Registry[TargetKind] = Registry("cluster.target", __name__)

for name, build in (("local", "local:LocalTarget"), ("ssh", "ssh:SshTarget"), ("slurm", "slurm:SlurmTarget")):
    LAUNCH_TARGETS.register(TargetKind(name, f"weft.launch.targets.{build}"))
