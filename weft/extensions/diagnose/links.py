"""Slow links: messages take longer than the link allows, than earlier in the run, or than between other ranks."""

from __future__ import annotations

import statistics

import numpy as np

from weft.extensions.diagnose.evidence import Floats, RankTable, RunEvidence, number
from weft.extensions.diagnose.finding import Finding, percent
from weft.planner.model.cluster_facts import cluster_facts
from weft.planner.number_format import seconds
from weft.planner.ranks import device_of

MIN_SHARE = 0.12
"""Share of the step that every rank waits for messages, from which it is worth a finding."""
SLOW_RATIO = 2.0
"""Ratio to earlier steps, or to other groups of ranks, from which a link is slow."""
LINK_SHARE = 0.2
"""Share of the link's bandwidth below which even the fastest message shows a slow link."""
UNKNOWN_LINK_GB_S = 0.1
"""Expected bandwidth where the planner knows no better: gigabit Ethernet."""
MIN_SAMPLES = 3
"""Timed steps that a finding about latency needs: on a busy machine a single message may be late."""
TIMED_STEPS = 10
"""Steps before a report in which messages are also looked at; they are timed every watch.comm_every steps."""
MAX_CONTENTION = 0.8
"""Largest share of a step that is left out because ranks waited for a core."""
MAX_HOP_MS = 2.0
"""Time of a small message's hop between two ranks from which latency is the cause."""
FIX = (
    "test the link (ping, iperf3, ib_write_bw, weft bench collectives) and its cable, switch and driver; until it is "
    "repaired comm.compression=adaptive or train.sync sends less"
)


def slow_link(found: RunEvidence) -> Finding | None:
    """The link between some ranks is slow."""
    return _reported(found) or _became_slow(found) or _slower_than_planned(found)


def _reported(found: RunEvidence) -> Finding | None:
    """The run itself has reported a link that became slow."""
    faults = found.faults("slow_link")
    if not faults:
        return None
    last = faults[-1]
    if _fast_on_a_busy_machine(found, str(last.get("axis")), (number(last.get("step")) or 0.0) - TIMED_STEPS):
        return None
    return Finding("slow_link", f"{last.get('why')} (since step {last.get('step')})", FIX, None, _exposed(found))


def _exposed(found: RunEvidence) -> float | None:
    shares = [s for r in found.records if (s := number(r.get("exposed_share"))) is not None]
    return 100 * statistics.median(shares) if shares else None


def _became_slow(found: RunEvidence) -> Finding | None:
    """Waits that no rank escapes have become longer: the last rank to arrive waits for the transfer alone."""
    table = found.table
    if table is None or table.ranks < 2 or len(table) < 24:
        return None
    third = len(table) // 3
    early, late = table.part(0, third), table.part(len(table) - third, len(table))
    for axis in table.waits:
        before, after = (float(np.median(_least_wait(part, axis))) for part in (early, late))
        share = (after - before) / float(np.median(late.seconds))
        slow = after > SLOW_RATIO * before and share > MIN_SHARE
        if slow and not _fast_on_a_busy_machine(found, axis, late.steps[0]):
            evidence = (
                f"messages on {axis} take {seconds(after)} a step at the end of the run and took "
                f"{seconds(before)} at its start, on every rank"
            )
            return Finding("slow_link", evidence, FIX, None, 100 * share)
    return None


def _fast_on_a_busy_machine(found: RunEvidence, axis: str, since: float) -> bool:
    """Whether ranks wait for cores from a step on, and messages are still as fast as the link: they wait for ranks."""
    table = found.table
    if table is None:
        return False
    contention = np.maximum(0.0, table.get("core_wait_s") - table.get("core_idle_s")).max(axis=1) / table.seconds
    rows = [r for r in found.records if isinstance(r.get("comm_axes"), dict) and (number(r.get("step")) or 0) >= since]
    figures = [a for r in rows if isinstance(a := r["comm_axes"].get(axis), dict)]
    best = max((number(a.get("best_gb_per_s")) or 0.0 for a in figures), default=0.0)
    busy = float(np.median(contention[np.array(table.steps) >= since])) if table.steps[-1] >= since else 0.0
    return busy > MIN_SHARE and best >= LINK_SHARE * _link_gb_s(found)


def _least_wait(table: RankTable, axis: str) -> Floats:
    """The shortest wait of a rank in each step, without the time in which other processes had a rank's core."""
    contention = np.maximum(0.0, table.get("core_wait_s") - table.get("core_idle_s")).max(axis=1)
    least: Floats = np.maximum(0.0, table.waits[axis].min(axis=1) - contention)
    return least


def _slower_than_planned(found: RunEvidence) -> Finding | None:
    """Even the fastest messages are far slower than the link should be, and every rank waits for them: where one rank
    is late, it hardly waits itself."""
    timed, table = [r for r in found.records if isinstance(r.get("comm_axes"), dict)], found.table
    if not timed or table is None:
        return None
    for axis, waits in table.waits.items():
        share = float(np.median(waits.min(axis=1) / table.seconds))
        rows = [a for r in timed if isinstance(a := r["comm_axes"].get(axis), dict)]
        best = [b for a in rows if (b := number(a.get("best_gb_per_s"))) is not None]
        if share < MIN_SHARE:
            slow = len(best) > 1 and max(best) < LINK_SHARE * _link_gb_s(found)
            if slow and (hidden := _hidden_by_core_waits(table, axis, rows, max(best))) is not None:
                return hidden
            continue
        shortest = [s for a in rows if (s := number(a.get("shortest_ms"))) is not None]
        ranks = max((int(number(a.get("ranks")) or 0) for a in rows), default=0)
        expected = _link_gb_s(found)
        if best and max(best) < LINK_SHARE * expected:
            evidence = (
                f"the fastest message on {axis} reached {max(best):.3g} GB/s on a link of {expected:.3g} GB/s, and "
                f"every rank waits {percent(share)} of the step for messages"
            )
            return Finding("slow_link", evidence, FIX, None, 100 * share)
        if len(shortest) >= MIN_SAMPLES and ranks > 1 and min(shortest) / (2 * (ranks - 1)) > MAX_HOP_MS:
            evidence = (
                f"the shortest message on {axis} takes {min(shortest):.1f} ms between {ranks} ranks: the latency of "
                f"the link is high, and every rank waits {percent(share)} of the step for messages"
            )
            return Finding("slow_link", evidence, FIX, None, 100 * share)
    return None


def _hidden_by_core_waits(
    table: RankTable, axis: str, rows: list[dict[str, object]], best_gb_s: float
) -> Finding | None:
    """Messages that pass while ranks wait for a core, which then hardly wait for them: even at the speed of the fastest
    one, they take a share of the time in which a core was free."""
    waited = table.get("core_wait_s").min(axis=1) - table.get("core_idle_s").mean(axis=1)
    contention = np.clip(waited, 0.0, MAX_CONTENTION * table.seconds)
    sent = float(np.median([number(row.get("mib")) or 0.0 for row in rows])) * 2**20 / 1e9
    exposed = np.minimum(sent / best_gb_s, table.waits[axis].min(axis=1) + contention)
    share = float(np.median(exposed / (table.seconds - contention)))
    if best_gb_s <= 0 or share < MIN_SHARE:
        return None
    evidence = (
        f"the fastest message on {axis} reached {best_gb_s:.3g} GB/s; at this speed messages take "
        f"{seconds(sent / best_gb_s)} a step, {percent(min(1.0, share))} of the time in which ranks have a core"
    )
    return Finding("slow_link", evidence, FIX, None, 100 * min(1.0, share))


def _link_gb_s(found: RunEvidence) -> float:
    """The slowest link of the cluster that the job describes; a cautious value where it describes none."""
    job, plan = found.job, found.plan
    if job is None or plan is None:
        return UNKNOWN_LINK_GB_S
    if plan.device == "cpu" and job.cluster.network == "auto" and not job.cluster.levels:
        return UNKNOWN_LINK_GB_S
    try:
        levels = cluster_facts(job, plan.world, device_of(job, plan)).levels
    except Exception:  # a device or network that this installation does not know
        return UNKNOWN_LINK_GB_S
    used = levels if plan.nodes > 1 else levels[:1]
    return min(float(level.gb_s) for level in used)
