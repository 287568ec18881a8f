"""`weft estimate JOB`: memory, time, energy and money of a layout, with a range and the sources of the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from weft.hardware.probe import probe
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner.calibration import Calibration, load_calibration
from weft.planner.estimator import Estimator, make_estimator, run_memory
from weft.planner.memory.stage_blocks import split_blocks
from weft.planner.model.reference_rate import step_flops
from weft.planner.own_calibration import own_calibration
from weft.planner.plan import Plan
from weft.planner.ranks import device_memory, device_of
from weft.planner.search.candidates import Layouts
from weft.planner.time.collectives import axis_group
from weft.planner.time.traffic import axis_bytes

POWER_SHARE = 0.85
"""Share of its rated power that a device draws while it trains."""
POWER_OVERHEAD = 1.35
"""Hosts, switches and cooling over the devices' own power (a DGX H100 draws 10.2 kW for 5.6 kW of GPUs; PUE 1.1)."""
SOURCES = {
    "parameters": "counted from the model's shape; ZeRO (Rajbhandari et al. 2020) where dp_shard cuts them; under "
    "ZeRO 1 and 2 with the weights that stay gathered for the step",
    "gradients": "ZeRO (Rajbhandari et al. 2020)",
    "optimizer": "ZeRO (Rajbhandari et al. 2020): master weights and moments",
    "activations": "kept tensors of a trace through one step; microbatches in flight after Narayanan et al. 2021",
    "communication": "weights being gathered, gradients being reduced, messages between stages, compression residuals",
    "temporary": "tensors that exist within one operator or block at the peak, logits of the loss among them",
    "runtime": "torch itself on a CPU rank; on a GPU, scratch of cuBLAS and cuDNN in compiled blocks",
    "compute": "roofline of each matrix product with the stack's efficiency curve",
    "pp_bubble": "Narayanan et al. 2021; Qi et al. 2023 for zero-bubble schedules",
    "communication time": "latency and bandwidth over the topology's levels (Hockney), ring collectives",
}


def estimate_job(job: Job, plan: Plan, stack: str | Calibration = "weft") -> dict[str, Any]:
    """What `weft estimate JOB --json` prints."""
    if job.model.module:
        raise JobError(
            f"model.module={job.model.module} cannot be estimated before it is built; use weft plan or dryrun"
        )
    if plan.pp > 1 and not plan.split:
        plan = replace(plan, split=split_blocks(job, plan.pp * plan.virtual_stages, pairs=plan.tp > 1))
    device = device_of(job, plan)
    if isinstance(stack, str):
        stack = own_calibration(job, device) if stack == "weft" else load_calibration(stack)
    estimator = make_estimator(job, plan, plan.world, device, device_memory(job, device, probe(), plan.world), stack)
    model, cluster, layouts = estimator.model, estimator.cluster, Layouts.one(plan)
    figures = estimator.estimate(layouts, detail=True)
    parts, moved = {part: float(gib[0]) for part, gib in figures.memory.items()}, axis_bytes(job, plan)
    seconds, peak = float(figures.step_time_s[0]), sum(parts.values())
    flops = step_flops(job) / plan.world
    mfu = flops / seconds / estimator.mfu_peak_flops(job, plan)
    tokens = job.train.global_batch * float(model.seq_len)
    hours = seconds * job.train.full_steps / 3600
    kwh = plan.world * cluster.watts * POWER_SHARE * POWER_OVERHEAD * hours / 1000
    price = cluster.price_usd_hour
    return {
        "step_time_s": seconds,
        "range_s": [float(figures.low_s[0]), float(figures.high_s[0])],
        "tokens_per_s_per_gpu": tokens / seconds / plan.world,
        "tflops_per_gpu": flops / seconds / 1e12,
        "mfu": mfu,
        "hfu": mfu * float(figures.computed[0]),
        "peak_memory_gib": peak,
        "memory_limit_gib": float(cluster.memory_gib),
        "memory_usable_gib": estimator.limit_gib,
        "fits": bool(figures.fits[0]),
        "memory": parts,
        "memory_by_stage": _stages(estimator, layouts) if plan.pp > 1 else [{"stage": 0, **parts, "total": peak}],
        "time": {part: float(s[0]) for part, s in figures.time.items()},
        "bytes": moved,
        "bytes_by_link": _by_link(estimator, layouts, moved),
        "energy_kwh": kwh,
        "cost_usd": None if price is None else price * plan.world * hours,
        "price_usd_hour": price,
        "hours": hours,
        "steps": job.train.steps,
        "tokens": tokens * job.train.full_steps,
        "own_run": run_memory(parts),
        "layout": plan.layout(),
        "world": plan.world,
        "device": plan.device_name,
        "calibration": stack.name,
        "sources": SOURCES,
    }


def _by_link(estimator: Estimator, layouts: Layouts, moved: dict[str, float]) -> dict[str, float]:
    """Bytes that a rank sends inside its node and over the network."""
    out = {"node": 0.0, "network": 0.0}
    for axis, bytes_ in moved.items():
        group = axis_group(estimator.cluster, layouts, axis, estimator.calibration)
        inside, ranks = float(np.ravel(group.inside)[0]), float(np.ravel(group.ranks)[0])
        leaves = 1 / inside if ranks > inside else 0.0
        out["network"] += bytes_ * leaves
        out["node"] += bytes_ * (1 - leaves) if inside > 1 else 0.0
    return out


def _stages(estimator: Estimator, layouts: Layouts) -> list[dict[str, float]]:
    """GiB by component on the first rank of each pipeline rank."""
    stages = np.arange(int(layouts.pp[0]))
    held = estimator.stage_gib(layouts.take(np.zeros_like(stages)), stages)
    rows = [{part: float(gib[i]) for part, gib in held.items()} for i in stages]
    return [{"stage": i, **parts, "total": sum(parts.values())} for i, parts in enumerate(rows)]


def show_estimate(figures: dict[str, Any]) -> str:
    """The estimate as text for the terminal."""
    verdict = "fits" if figures["fits"] else "does not fit"
    low, high = figures["range_s"]
    lines = [
        f"{figures['layout']} on {figures['world']} × {figures['device']}, calibration {figures['calibration']}",
        "",
        f"step        {_duration(figures['step_time_s'])}  ({_duration(low)} to {_duration(high)})",
        f"tokens      {figures['tokens_per_s_per_gpu']:,.0f} a second and device,"
        f" {figures['tflops_per_gpu']:.1f} TFLOP/s, MFU {figures['mfu']:.1%}, HFU {figures['hfu']:.1%}",
        f"memory      {figures['peak_memory_gib']:.2f} of {figures['memory_limit_gib']:.1f} GiB: {verdict}",
    ]
    lines += [f"  {part:16} {gib:9.3f} GiB" for part, gib in figures["memory"].items() if gib]
    if len(figures["memory_by_stage"]) > 1:
        lines.append(
            "  by stage         " + ", ".join(f"{s['total']:.2f}" for s in figures["memory_by_stage"]) + " GiB"
        )
    lines.append("time")
    lines += [
        f"  {part:16} {_duration(s):>9}  {s / figures['step_time_s']:6.1%}"
        for part, s in figures["time"].items()
        if s > 1e-9
    ]
    moved = [f"{axis} {b / 2**30:.3f} GiB" for axis, b in figures["bytes"].items() if b]
    lines.append("bytes       " + (", ".join(moved) or "none") + " a rank and step")
    money = "no price is known" if figures["cost_usd"] is None else f"{figures['cost_usd']:,.2f} USD"
    steps = f"{figures['steps']} steps, {figures['tokens']:,.0f} tokens"
    lines.append(f"whole run   {steps}: {figures['hours']:,.2f} h, {figures['energy_kwh']:,.2f} kWh, {money}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
