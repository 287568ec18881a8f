"""Causes that the ranks' own figures show: a slow rank, missing data, a host that is too slow, a neighbour."""

from __future__ import annotations

import numpy as np

from weft.extensions.diagnose.evidence import Floats, RankTable, RunEvidence, number
from weft.extensions.diagnose.finding import Finding, percent
from weft.planner.number_format import seconds

SLOW_RATIO, STEADY_RATIO = 1.25, 1.15
"""Ratio of a rank's compute time to the others' from which it is slow; and in each half of the run."""
MIN_SHARE = 0.1
"""Share of the step's time below which a cause is not reported."""
MIN_LOST_S = 0.002
"""Seconds of a step below which a difference is noise."""
MIN_SLACK_SHARE = 0.2
"""A host whose GPU still has work at the end of fewer steps than this share is too slow for it."""
NEIGHBOUR_CORES = 0.5
"""Cores' worth of other processes' work from which they are a neighbour; on small machines a quarter of the cores."""


def _typical(values: Floats) -> Floats:
    """A typical value of each rank: the mean of the middle half of the steps."""
    ordered = np.sort(values, axis=0)
    quarter = len(ordered) // 4
    middle: Floats = ordered[quarter : len(ordered) - quarter].mean(axis=0)
    return middle


def _compute(table: RankTable) -> Floats:
    """Compute time of each rank, without waits for a core while no core was idle: those are a neighbour's."""
    contention = np.maximum(0.0, table.get("core_wait_s").mean(axis=0) - table.get("core_idle_s").mean(axis=0))
    return np.maximum(0.0, _typical(table.figures["busy_s"]) - contention)


def _ratio(busy: Floats, rank: int) -> tuple[float, float]:
    others = float(np.median(np.delete(busy, rank)))
    return (busy[rank] / others if others > 0 else 1.0), float(busy[rank]) - others


def slow_rank(found: RunEvidence) -> Finding | None:
    """One rank computes longer than the others, which wait for it."""
    fix = (
        "see what else runs there (top, nvidia-smi), its temperature and clocks; resilience.evict_slow=true replaces "
        "its process, and resilience.rebalance=true moves sequences to other ranks"
    )
    table = found.table
    if table is None or table.ranks < 2:
        return None
    reported = found.faults("slow_rank")
    moved = [e for e in found.events if e.get("event") == "recovered" and e.get("how") == "rebalance"]
    if reported and moved:  # afterwards compute times are equal
        return _rebalanced(found, table, reported, moved[-1], fix)
    busy = _compute(table)
    rank = int(np.argmax(busy))
    ratio, lost = _ratio(busy, rank)
    steady = all(_ratio(_compute(half), rank)[0] > STEADY_RATIO for half in table.halves())
    share = lost / found.step_s if found.step_s else 0.0
    if ratio < SLOW_RATIO or lost < MIN_LOST_S or share < MIN_SHARE or not steady or (found.plan and found.plan.pp > 1):
        return None
    others = float(np.median(np.delete(busy, rank)))
    evidence = (
        f"rank {rank} computes {seconds(float(busy[rank]))} a step, the others {seconds(others)}: "
        f"{ratio:.1f} times as long, in both halves of the run"
    )
    return Finding("slow_rank", evidence, fix, rank, 100 * min(1.0, share))


def _rebalanced(
    found: RunEvidence, table: RankTable, reported: list[dict[str, object]], moved: dict[str, object], fix: str
) -> Finding | None:
    rank = number(reported[-1].get("rank"))
    shares = moved.get("shares")
    if rank is None or not isinstance(shares, list) or not shares or not all(number(n) for n in shares):
        return None
    lost = 1 - sum(shares) / (len(shares) * max(shares))
    evidence = (
        f"{reported[-1].get('why')} (step {reported[-1].get('step')}); sequences were moved to other ranks, "
        f"{shares} a step instead of equal shares"
    )
    return Finding("slow_rank", evidence, fix, int(rank), 100 * lost) if lost > 0.03 else None


def data_starved(found: RunEvidence) -> Finding | None:
    """Ranks wait for batches."""
    table = found.table
    if table is None:
        return None
    waits = table.get("data_s").sum(axis=0)
    share = waits / table.seconds.sum()
    rank = int(np.argmax(share))
    if share[rank] < MIN_SHARE:
        return None
    steps = int((table.get("data_s")[:, rank] > 0.05 * table.seconds).sum())
    alone = table.ranks > 1 and share[rank] > 3 * float(np.median(np.delete(share, rank)))
    whose = f"rank {rank} alone waits" if alone else "ranks wait"
    evidence = (
        f"{whose} {seconds(float(waits[rank]) / len(table))} of {seconds(float(table.seconds.mean()))} a "
        f"step for the next batch, in {steps} of {len(table)} steps"
    )
    fix = (
        "read samples faster: build a token store (weft data build), move the files to a local disk, make the "
        "dataset's __getitem__ cheaper, or raise data.prefetch if only some batches are late"
    )
    return Finding("data_starved", evidence, fix, rank if alone else None, 100 * float(share[rank]))


def host_bound(found: RunEvidence) -> Finding | None:
    """A GPU waits for its host, which launches kernels too slowly."""
    fix = "train.compile=true fuses kernels; a larger train.microbatch makes each launch do more work"
    table = found.table
    if found.cuda and table is not None and "slack_s" in table.figures:
        slack = float(table.get("slack_s").sum() / table.seconds.sum() / table.ranks)
        waits = sum(float(w.mean()) for w in table.waits.values()) / found.step_s if found.step_s else 0.0
        data = float(table.get("data_s").mean()) / found.step_s if found.step_s else 0.0
        if slack < MIN_SLACK_SHARE and data < MIN_SHARE and waits < 0.5:
            evidence = (
                f"after {percent(1 - slack)} of the steps' time the GPU has finished all work when the host has queued "
                "the step: it waits for the host"
            )
            return Finding("host_bound", evidence, fix, costs_percent=_gap(found))
    for trace in found.traces:
        ranks = trace.get("ranks")
        parts = [r.get("parts_ms", {}) for r in ranks] if found.cuda and isinstance(ranks, list) else []
        shares = [number(p.get("host")) or 0.0 for p in parts]
        steps = [number(r.get("step_ms")) or 0.0 for r in ranks or ()]
        if shares and min(steps) > 0 and (share := max(h / s for h, s in zip(shares, steps, strict=True))) > MIN_SHARE:
            evidence = f"in the traced steps the GPU is idle {percent(share)} of the time while the host runs Python"
            return Finding("host_bound", evidence, fix, costs_percent=100 * share)
    return None


def _gap(found: RunEvidence) -> float | None:
    """Per cent by which the step is longer than planned."""
    planned = number((found.plan.predicted if found.plan else {}).get("step_time_s"))
    return 100 * (1 - planned / found.step_s) if planned and found.step_s > planned else None


def neighbour(found: RunEvidence) -> Finding | None:
    """Other processes use the cores that ranks need."""
    table, cores = found.table, found.cores
    if table is None or not cores or "cpu_s" not in table.figures or found.plan is None:
        return None
    per_node = max(1, table.ranks // max(1, found.plan.nodes))
    total, worst = float(table.seconds.sum()), (0.0, 0.0, 0)
    for node in range(0, table.ranks, per_node):
        ours = slice(node, node + per_node)
        own = float(table.get("cpu_s")[:, ours].sum())
        used = cores * total - float(table.get("core_idle_s")[:, ours].mean(axis=1).sum())
        worst = max(worst, ((used - own) / total, table.core_wait_share(ours), node))
    others, wait, node = worst
    if others < min(NEIGHBOUR_CORES, cores / 4) or wait < MIN_SHARE:
        return None
    where = f"the machine of ranks {node} to {node + per_node - 1}" if per_node < table.ranks else "this machine"
    evidence = (
        f"processes that are not ranks use {others:.1f} of {cores} cores on {where}, and ranks wait {percent(wait)} of "
        "the time for a core"
    )
    fix = "end the other processes (top shows them), or give the run cores of its own (taskset, cgroups, Slurm)"
    return Finding("neighbour", evidence, fix, costs_percent=100 * min(1.0, wait))
