"""Runs on a Ray cluster, in a placement group with one actor a node.

Registers the target `ray` of `weft launch`.
"""

from weft.launch.targets.target_kinds import LAUNCH_TARGETS, TargetKind

LAUNCH_TARGETS.register(TargetKind("ray", "weft.extensions.ray.ray_target:RayTarget"))
