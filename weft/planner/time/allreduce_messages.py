"""What `comm.allreduce` by messages (comm/algorithms.py) sends and receives, and its rounds."""

from __future__ import annotations

from weft.planner.plan import Plan


def by_messages(allreduce: str) -> bool:
    """Whether replicas sum by messages, not by the backend's all-reduce."""
    return allreduce not in ("auto", "native")


def sent_of(allreduce: str, ranks: int, rank: int, near: int = 1) -> float:
    """What one of the ranks sends in an all-reduce, and receives, as a multiple of the tensor; `near` of the ranks are
    on a node (hierarchical)."""
    if allreduce == "ring":
        return 2 * (ranks - 1) / ranks
    if allreduce == "tree":
        distances = [1 << i for i in range((ranks - 1).bit_length())]
        children = sum(1 for d in distances if rank % (2 * d) == 0 and rank + d < ranks)
        return children + (rank > 0)
    near = max(1, min(near, ranks))
    core = ranks // near * near
    if rank >= core:
        return 1
    return 2 * (core - 1) / core + (rank + core < ranks)


def ranks_on_node(plan: Plan) -> int:
    """The largest number of replicas, each on every tp-th rank, on one node."""
    ranks, per_node = range(0, plan.dp_replicate * plan.cp * plan.tp, plan.tp), max(1, plan.world // plan.nodes)
    return max(sum(1 for r in ranks if r // per_node == node) for node in {r // per_node for r in ranks})
