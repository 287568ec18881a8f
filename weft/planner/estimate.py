"""`weft estimate JOB`: memory, time, energy and money of a layout, with a range and the sources of the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.hardware.measured import load_measured
from weft.hardware.probe import probe
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner.calibration import Calibration, load_calibration
from weft.planner.memory.layouts_memory import GIB, stage_memory
from weft.planner.memory.prediction import is_counted, predict_memory, stage_peaks
from weft.planner.memory.rank_bytes import states_of
from weft.planner.model.facts import ClusterFacts, ModelFacts, cluster_facts, model_facts
from weft.planner.own_calibration import own_calibration
from weft.planner.plan import Plan
from weft.planner.ranks import device_memory, device_of
from weft.planner.search.candidates import Layouts
from weft.planner.time.measured_device import step_seconds
from weft.planner.time.step import Estimates, estimate

POWER_SHARE = 0.85
"""Share of its rated power that a device draws while it trains."""
POWER_OVERHEAD = 1.35
"""Hosts, switches and cooling over the devices' own power (a DGX H100 draws 10.2 kW for 5.6 kW of GPUs; PUE 1.1)."""
SOURCES = {
    "parameters": "counted from the model's shape; ZeRO (Rajbhandari et al. 2020) where dp_shard cuts them",
    "gradients": "ZeRO (Rajbhandari et al. 2020)",
    "optimizer": "ZeRO (Rajbhandari et al. 2020): master weights and moments",
    "activations": "Korthikanti et al. 2022, equations 1 to 6; waiting microbatches after Narayanan et al. 2021",
    "logits": "tokens × vocabulary / tp × bytes of the loss",
    "communication": "gathered weights (zero 3) and gradient buckets",
    "reserve": "driver context and what the allocator cannot use",
    "compute": "roofline of each matrix product with the stack's efficiency curve",
    "pp_bubble": "Narayanan et al. 2021; Qi et al. 2023 for zero-bubble schedules",
    "communication time": "latency and bandwidth over the topology's levels (Hockney), ring collectives",
}


def job_facts(job: Job, plan: Plan) -> tuple[ModelFacts, ClusterFacts]:
    """Model and cluster facts of a planned job."""
    device = device_of(job, plan)
    memory = device_memory(job, device, probe(), plan.world)
    return model_facts(job), cluster_facts(job, plan.world, device, memory)


def estimate_job(job: Job, plan: Plan, stack: str | Calibration = "weft") -> dict[str, Any]:
    """What `weft estimate JOB --json` prints."""
    if job.model.module:
        raise JobError(f"model.module={job.model.module} cannot be estimated before it is built; use weft dryrun")
    model, cluster = job_facts(job, plan)
    name = stack if isinstance(stack, str) else stack.name
    own = name.startswith("weft") and is_counted(job, plan)
    device = device_of(job, plan)
    cal = own_calibration(device) if stack == "weft" else load_calibration(stack) if isinstance(stack, str) else stack
    layouts = Layouts.one(plan)
    told = estimate(model, cluster, layouts, cal, job.train.global_batch)
    parts = {part: float(gib[0]) for part, gib in told.memory.items()}
    if own:
        parts = own_memory(job, plan, parts["logits"])
    peak = sum(parts.values())
    slower = 1.0
    measured = load_measured(plan.device_name) if own else None
    if measured and (took := step_seconds(job, plan, measured)):  # on one device measurements stand above the model
        usual = own_calibration(device)
        slower = took / float(estimate(model, cluster, layouts, usual, job.train.global_batch).step_time_s[0])
    seconds = float(told.step_time_s[0]) * slower
    tokens = job.train.global_batch * float(model.seq_len)
    hours = seconds * job.train.full_steps / 3600
    kwh = plan.world * cluster.watts * POWER_SHARE * POWER_OVERHEAD * hours / 1000
    price = cluster.price_usd_hour
    return {
        "step_time_s": seconds,
        "range_s": [float(told.low_s[0]) * slower, float(told.high_s[0]) * slower],
        "tokens_per_s_per_gpu": tokens / seconds / plan.world,
        "tflops_per_gpu": float(told.tflops[0]) / slower,
        "mfu": float(told.mfu[0]) / slower,
        "hfu": float(told.hfu[0]) / slower,
        "peak_memory_gib": peak,
        "memory_limit_gib": float(cluster.memory_gib),
        "fits": peak <= cluster.memory_gib * cal.usable,
        "memory": parts,
        "memory_by_stage": _own_stages(job, plan, parts) if own else _stages(model, layouts, cal),
        "time": {part: float(s[0]) * slower for part, s in told.time.items()},
        "bytes": {axis: float(b[0]) for axis, b in told.bytes.items()},
        "bytes_by_link": {level: float(np.ravel(b)[0]) for level, b in told.level_bytes.items()},
        "energy_kwh": kwh,
        "cost_usd": None if price is None else price * plan.world * hours,
        "price_usd_hour": price,
        "hours": hours,
        "steps": job.train.steps,
        "tokens": tokens * job.train.full_steps,
        "own_run": predict_memory(job, plan),
        "layout": plan.layout(),
        "world": plan.world,
        "device": plan.device_name,
        "calibration": cal.name,
        "sources": SOURCES,
    }


def own_memory(job: Job, plan: Plan, logits: float) -> dict[str, float]:
    """GiB by part as Weft's own engine holds them: states counted exactly, the rest as its peak is predicted."""
    found, states = predict_memory(job, plan), states_of(job, plan)
    assert states is not None
    sure = {
        "parameters": (states.parameters + states.copies + states.average) / GIB,
        "gradients": states.gradients / GIB,
        "optimizer": states.optimizer / GIB,
        "reserve": found["runtime_gib"],
    }
    # a copy of the weights that stays counts as a parameter, not once more as gathered
    room = max(0.0, found["memory_gib"] - sum(sure.values()))
    sure["communication"] = min(room, found["gathered_gib"])
    rest = room - sure["communication"]
    return {**sure, "activations": max(0.0, rest - logits), "logits": min(rest, logits)}


def _own_stages(job: Job, plan: Plan, parts: dict[str, float]) -> list[dict[str, float]]:
    """GiB on the first rank of each stage of Weft's own engine; without a walk through it, the fullest for all."""
    names = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "working": "activations"}
    peaks = stage_peaks(job, plan) if plan.pp > 1 else []
    walked = [{told: p[name] / GIB for name, told in names.items()} for p in peaks]
    out = []
    for index, held in enumerate(walked or [parts] * plan.pp):
        whole = {**held, "reserve": parts["reserve"]}
        out.append({"stage": index, **whole, "total": sum(whole.values())})
    return out


def _stages(model: ModelFacts, layouts: Layouts, cal: Calibration) -> list[dict[str, float]]:
    """GiB by part on each rank of a pipeline."""
    out = []
    for index in range(int(layouts.pp[0])):
        parts = {k: float(np.ravel(v)[0]) / GIB for k, v in stage_memory(model, layouts, cal, index).items()}
        out.append({"stage": index, **parts, "total": sum(parts.values())})
    return out


def show_estimate(told: dict[str, Any]) -> str:
    """The estimate as text for the terminal."""
    verdict = "fits" if told["fits"] else "does not fit"
    low, high = told["range_s"]
    lines = [
        f"{told['layout']} on {told['world']} × {told['device']}, calibration {told['calibration']}",
        "",
        f"step        {_duration(told['step_time_s'])}  ({_duration(low)} to {_duration(high)})",
        f"tokens      {told['tokens_per_s_per_gpu']:,.0f} a second and device, {told['tflops_per_gpu']:.1f} TFLOP/s,"
        f" MFU {told['mfu']:.1%}, HFU {told['hfu']:.1%}",
        f"memory      {told['peak_memory_gib']:.2f} of {told['memory_limit_gib']:.1f} GiB: {verdict}",
    ]
    lines += [f"  {part:16} {gib:9.3f} GiB" for part, gib in told["memory"].items()]
    if len(told["memory_by_stage"]) > 1:
        lines.append("  by stage         " + ", ".join(f"{s['total']:.2f}" for s in told["memory_by_stage"]) + " GiB")
    lines.append("time")
    lines += [
        f"  {part:16} {_duration(s):>9}  {s / told['step_time_s']:6.1%}" for part, s in told["time"].items() if s > 1e-9
    ]
    moved = [f"{axis} {b / 2**30:.3f} GiB" for axis, b in told["bytes"].items() if b]
    lines.append("bytes       " + (", ".join(moved) or "none") + " a rank and step")
    money = "no price is known" if told["cost_usd"] is None else f"{told['cost_usd']:,.2f} USD"
    steps = f"{told['steps']} steps, {told['tokens']:,.0f} tokens"
    lines.append(f"whole run   {steps}: {told['hours']:,.2f} h, {told['energy_kwh']:,.2f} kWh, {money}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


__all__ = ["Estimates", "estimate_job", "job_facts", "show_estimate"]
