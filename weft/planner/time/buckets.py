"""Size of the gradient buckets of replicas, from the cost of a message (α) and of a byte (β)."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np

from weft.hardware.catalog import Device, find_device
from weft.hardware.linear_fit import fit_line
from weft.hardware.measured import load_measured
from weft.job.schema import Job
from weft.planner.model.cluster_facts import cluster_facts
from weft.planner.model.counts import count_parameters, count_trained
from weft.planner.model.model_facts import Size
from weft.planner.own_calibration import own_calibration
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts, distinct
from weft.planner.time.collectives import rank_group

MIN_BUCKET_MB, MAX_BUCKET_MB = 1.0, 200.0
CPU_ALL_REDUCE_LATENCY_S = 2e-3
"""Latency of an all-reduce between CPU ranks over Gloo or MPI, where not measured. They often outnumber the cores:
`weft bench collectives` gave 4.3 ms with four ranks on two cores."""


def all_reduce_cost(job: Job, plan: Plan, device: Device) -> tuple[float, float]:
    """α and β of an all-reduce over the replicas: measured by `weft calibrate`, else from the catalog."""
    n = plan.dp_replicate * plan.cp
    measured = load_measured(device.name)
    seen = [m for m in measured.collectives if m.kind == "all_reduce" and m.seconds > 0] if measured else []
    seen = [m for m in seen if m.axis == "dp_replicate"] or seen
    if plan.nodes == 1 and len({m.bytes for m in seen}) > 1:
        alpha, beta = fit_line([m.bytes for m in seen], [m.seconds for m in seen])
        if alpha > 0 and beta > 0:
            return alpha, beta
    found = rank_group(cluster_facts(job, plan.world, device), n, plan.tp, own_calibration(job, device))
    alpha = 2 * float(found.latency_s) + (CPU_ALL_REDUCE_LATENCY_S if plan.device == "cpu" else 0.0)
    return alpha, 2 * (n - 1) / n / (float(found.gb_s) * 1e9)


def bucket_sizes(job: Job, plan: Plan, layouts: Layouts) -> Size:
    """Bucket size of each layout, in MiB; `plan` has what they do not."""
    if job.comm.bucket_mb != "auto":
        return np.full(len(layouts), job.comm.bucket_mb)
    device = find_device(plan.device_name, job.cluster.catalog)
    columns = layouts.dp_replicate, layouts.cp, layouts.tp, layouts.pp
    first, position = distinct(*columns)
    sizes = [
        bucket_mb(job, replace(plan, dp_replicate=copies, dp_shard=1, cp=cp, tp=tp, pp=pp), device)[0]
        if copies * cp > 1
        else plan.bucket_mb
        for copies, cp, tp, pp in zip(*(column[first].tolist() for column in columns), strict=True)
    ]
    return np.array(sizes)[position]


def bucket_mb(job: Job, plan: Plan, device: Device) -> tuple[float, str]:
    """Bucket size and the reason. Of S bytes in buckets of b, S/b messages cost α each, and the last, which is not
    overlapped, costs β · b: the sum is least at b = √(S · α / β)."""
    parameters = count_parameters(job.model)
    if parameters is None:
        return Plan.bucket_mb, ""
    trained = parameters.total if job.model.lora is None else count_trained(job.model)
    size = 4 * trained / (plan.tp * plan.pp)
    alpha, beta = all_reduce_cost(job, plan, device)
    best = min(MAX_BUCKET_MB, max(MIN_BUCKET_MB, sqrt(size * alpha / beta) / 2**20))
    rounded = float(f"{best:.2g}")
    return rounded, f"buckets of {rounded:g} MiB: a sum costs {alpha * 1e6:.0f} µs and {beta * 1e9:.2g} ns a byte"
