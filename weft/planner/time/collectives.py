"""Time of collectives: latency and bandwidth (α–β) over the levels of the topology."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.planner.calibration import Calibration
from weft.planner.model.cluster_facts import ClusterFacts
from weft.planner.model.model_facts import Size
from weft.planner.search.candidates import NEAREST_FIRST, Layouts


@dataclass(frozen=True)
class Group:
    """The ranks of one axis and their links."""

    ranks: Size
    inside: Size
    """How many of them share the innermost level."""
    gb_s: Size
    """Bus bandwidth of a ring through all of them."""
    latency_s: Size
    """Of one ring or tree through all of them, for a small message."""
    across: Size
    """1 where the ring leaves the innermost level."""
    one_gb_s: Size
    """Between two ranks in different groups of the innermost level."""


def axis_group(cluster: ClusterFacts, layouts: Layouts, axis: str, cal: Calibration) -> Group:
    """The group of an axis of the mesh, of `ep`, or of all ranks (`everyone`)."""
    if axis not in NEAREST_FIRST:
        return rank_group(cluster, layouts.ep if axis == "ep" else layouts.world, 1.0, cal)
    nearer = [getattr(layouts, other) for other in NEAREST_FIRST[: NEAREST_FIRST.index(axis)]]
    stride = np.prod([np.ones(len(layouts)), *nearer], axis=0)
    return rank_group(cluster, getattr(layouts, axis), stride, cal)


def rank_group(cluster: ClusterFacts, ranks: Size, stride: Size, cal: Calibration) -> Group:
    """`ranks` ranks, each `stride` from the next."""
    ranks, stride = np.asarray(ranks, float), np.asarray(stride, float)
    gb_s = np.asarray(cluster.levels[0].gb_s * cal.link, float) + 0 * ranks
    latency = np.zeros_like(gb_s)
    one = gb_s
    below = np.ones_like(gb_s)  # ranks of the group inside one unit of the level below
    for depth, level in enumerate(cluster.levels):
        within = np.clip(np.floor(level.size / stride), 1, ranks)
        parts = within / below
        speed = level.gb_s / level.oversubscription * (cal.link if depth == 0 else cal.network)
        if depth:
            gb_s = np.where(parts > 1, np.minimum(gb_s, speed * below), gb_s)
            one = np.where(parts > 1, np.minimum(one, speed), one)
        hops = np.minimum(parts - 1, 2 * np.log2(np.maximum(parts, 1)) + 1)
        latency = latency + np.where(parts > 1, hops * level.latency_us * cal.latency * 1e-6, 0.0)
        below = np.maximum(below, within)
    inside = np.clip(np.floor(cluster.levels[0].size / stride), 1, ranks)
    return Group(ranks, inside, gb_s, latency, (ranks > inside) * 1.0, one)


def all_gather_time(g: Group, bytes_: Size) -> Size:
    """All-gather or reduce-scatter; `bytes_` is the size of the whole buffer."""
    return np.where(g.ranks > 1, g.latency_s + bytes_ * (g.ranks - 1) / g.ranks / (g.gb_s * 1e9), 0.0)


def all_reduce_time(g: Group, bytes_: Size) -> Size:
    """All-reduce: a reduce-scatter and an all-gather."""
    return 2 * all_gather_time(g, bytes_)


def ring_time(g: Group, bytes_: Size) -> Size:
    """All-reduce by a ring of messages: each round passes through one link between nodes."""
    rounds = 2 * (g.ranks - 1)
    return np.where(g.ranks > 1, rounds * (_hop_s(g) + bytes_ / g.ranks / (g.one_gb_s * 1e9)), 0.0)


def tree_time(g: Group, bytes_: Size) -> Size:
    """All-reduce by a binomial tree of messages, up and down: the root's link carries the tensor in every round."""
    rounds = 2 * np.ceil(np.log2(np.maximum(g.ranks, 1)))
    return np.where(g.ranks > 1, rounds * (_hop_s(g) + bytes_ / (g.one_gb_s * 1e9)), 0.0)


REPLICA_SUMS = {"auto": all_reduce_time, "native": all_reduce_time, "hierarchical": all_reduce_time,
                "ring": ring_time, "tree": tree_time}  # fmt: skip
"""Time of an all-reduce over replicas by comm.allreduce; two levels use all links of a node, as backends do."""


def _hop_s(g: Group) -> Size:
    """Latency of a message to the next rank."""
    return g.latency_s / np.maximum(g.ranks - 1, 1)


def all_to_all_time(g: Group, bytes_: Size, copies: Size = 1) -> Size:
    """All-to-all in which each rank sends `bytes_` in total, evenly to all.

    Of `copies` of a row to ranks of one node only one crosses the network, as in DeepEP and HybridEP.
    """
    nodes = np.maximum(g.ranks / g.inside, 1)
    copies = np.maximum(copies, 1)
    met = nodes * (1 - (1 - 1 / nodes) ** copies) / copies
    out = bytes_ * (g.ranks - g.inside) / g.ranks * np.where(copies > 1, np.minimum(met, 1), 1)
    near = bytes_ * np.maximum(g.inside - 1, 0) / g.ranks
    link: Size = np.where(g.across > 0, np.maximum(g.gb_s, g.one_gb_s), g.gb_s)
    time = np.maximum(near / (link * 1e9), out / (g.one_gb_s * 1e9))
    return np.where(g.ranks > 1, g.latency_s + time, 0.0)


def send_time(g: Group, bytes_: Size) -> Size:
    """Point-to-point message to the next rank of the group."""
    return np.where(g.ranks > 1, _hop_s(g) + bytes_ / (g.one_gb_s * 1e9), 0.0)
