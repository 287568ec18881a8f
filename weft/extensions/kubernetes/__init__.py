"""Runs on Kubernetes: manifests of Jobs, JobSets, TrainJobs and PyTorchJobs, and a client that follows them.

Registers the target `kubernetes` of `weft launch`.
"""

from weft.launch.targets.target_kinds import LAUNCH_TARGETS, TargetKind

LAUNCH_TARGETS.register(TargetKind("kubernetes", "weft.extensions.kubernetes.kubernetes_target:KubernetesTarget"))
