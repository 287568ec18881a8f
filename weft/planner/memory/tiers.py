"""Homes of states: what stays on the device, what lives in host memory or on disk, and what is copied in a step."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from weft.hardware.probe import GIB
from weft.job.errors import FitError
from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.planner.disk_space import free_gib
from weft.planner.engine_constants import STREAM_SLOTS, WEIGHT_UNITS
from weft.planner.memory.engine_memory import EngineMemory, Place
from weft.planner.memory.long_sequences import host_gib
from weft.planner.memory.states import low_half_bytes, piece_elements, stored_bytes
from weft.planner.model.counts import count_parameters
from weft.planner.model.model_facts import Size
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts

RESIDENT: dict[str, Any] = {
    "offload": "none", "offload_fraction": "auto", "disk": None, "disk_gib": None, "disk_tbw": None,
}  # fmt: skip
"""Settings of memory with which all states are on the device."""
AUTO_OFFLOADS: tuple[dict[str, Any], ...] = (
    RESIDENT, {**RESIDENT, "split_master": True}, {"offload": "states"}, {"offload": "all"},
)  # fmt: skip
"""What memory.offload=auto tries, by the time that it costs. The first that fits is taken."""


def auto_offloads(job: Job) -> tuple[dict[str, Any], ...]:
    """Those of AUTO_OFFLOADS that a job, whose model is resolved, can use: homes that it pins need states elsewhere."""
    return AUTO_OFFLOADS[2 * bool(job.memory.homes) : len(AUTO_OFFLOADS) - (not job.model.runs_in_parts)]


LAST_RESORTS: dict[tuple[str, ...], str] = {
    ("weights",): "weights of blocks live in host memory as far as they do not fit",
    ("gradients",): "gradients of blocks live in host memory: they would not fit otherwise",
    ("gradients", "weights"): "gradients of blocks live in host memory, and their weights as far as they do not fit",
    ("released",): "blocks are updated in the backward pass, which frees their gradients: they would not fit otherwise",
    ("released", "weights"): "blocks are updated in the backward pass, which frees their gradients, and their weights "
    "live in host memory as far as they do not fit",
}
"""What else leaves the device with memory.offload=all or auto, if nothing less fits."""
OFFLOAD_REASONS = {
    "states": "states live outside of the device as far as they do not fit",
    "all": "states and activations live outside of the device: nothing less fits",
}
DISK_SHARE = 0.9
"""Share of the free space of memory.disk that states may take."""
STREAM_SHARE = 0.8
"""Share of the memory that is left on the device that is used to fetch states ahead of their update."""
MARGIN = 1.02
"""Homes are assigned by whole weights, so a little more than what does not fit is offloaded."""


def can_split(job: Job, precision: str, world: int) -> bool:
    """Whether master weights can be split: they have a bf16 copy, and nothing but the optimizer reads them."""
    return world == 1 and precision in ("bf16", "fp8") and not job.model.module


def can_release(job: Job, precision: str) -> bool:
    """Whether blocks can be updated in the backward pass: their gradients are then not scaled or summed afterwards."""
    whole = job.train.microbatch in ("auto", job.train.global_batch) and job.train.accumulation in ("auto", 1)
    return not job.optim.clip and precision != "fp16" and whole and not job.train.batch_ramp


def last_resorts(job: Job, precision: str) -> dict[tuple[str, ...], str]:
    """Those of LAST_RESORTS that a job can use: gradients that can be released need no host memory."""
    other = "gradients" if can_release(job, precision) else "released"
    return {also: reason for also, reason in LAST_RESORTS.items() if other not in also}


def may_fit(job: Job, plan: Plan, world: int, memory_gib: float) -> bool:
    """Whether a rank's device, host memory and disk could hold weights, states and gradients, and nothing else."""
    counts = count_parameters(job.model)
    if counts is None or job.model.lora is not None:
        return True
    held = plan.compute_bytes + state_bytes_per_parameter(job, can_split(job, plan.precision, world))
    held += 0 if can_release(job, plan.precision) else plan.compute_bytes
    space = memory_gib + _host_budget(job, world) + (_disk_budget(job, plan, world) if job.memory.disk else 0.0)
    return counts.total * held / world / GIB <= space


def tier_settings(job: Job, plan: Plan, world: int, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """The plan's fields for the search: as much offloaded as memory.offload allows, `also` of gradients and weights."""
    memory = job.memory
    offloads = memory.offload in ("states", "all")
    split = can_split(job, plan.precision, world) and (
        memory.split_master is True or memory.states == "24bit-master" or (memory.split_master == "auto" and offloads)
    )
    if not offloads:
        return {"split_master": split, "states": memory.states}
    share = _most(job, plan, split, world) if memory.offload_fraction == "auto" else memory.offload_fraction
    pinned = pinned_shares(job)
    away = share or any(sum(own.values()) for own in pinned.values())
    return {
        "split_master": split, "states": memory.states, "host_share": share, "disk": memory.disk or "",
        "weight_share": _pinned(job, "weights").get("host", 0.0) or float("weights" in also),
        "gradient_home": _gradient_home(job, also),
        "home_shares": pinned, "stream_gib": away and STREAM_SLOTS * _piece_bytes(job, split, world) / GIB,
    }  # fmt: skip


def _gradient_home(job: Job, also: tuple[str, ...]) -> str:
    if "gradients" in job.memory.homes:
        return next(iter(_pinned(job, "gradients")), "device")
    return "released" if "released" in also else "host" if "gradients" in also else "device"


def _most(job: Job, plan: Plan, split: bool, world: int) -> float:
    """Share of the states that host memory and disk can hold."""
    counts = count_parameters(job.model)
    if counts is None:
        return 1.0
    total = counts.total * state_bytes_per_parameter(job, split) / world / GIB
    room = _host_budget(job, world) + (_disk_budget(job, plan, world) if job.memory.disk else 0.0)
    return min(1.0, room / max(total, 1e-9))


def _host_budget(job: Job, world: int) -> float:
    """GiB of host memory for the states of a rank."""
    return float(host_gib(job, Layouts.of(dp_replicate=world))[0])


def _disk_budget(job: Job, plan: Plan, world: int) -> float:
    """GiB of memory.disk for the states of a rank."""
    assert job.memory.disk is not None
    return job.memory.disk_gib or free_gib(job.memory.disk) * DISK_SHARE * plan.nodes / world


def pinned_shares(job: Job) -> dict[str, dict[str, float]]:
    """Shares in host memory and on disk of the kinds of states that memory.homes pins."""
    return {kind: _pinned(job, kind) for kind in job.memory.homes if kind not in ("weights", "gradients")}


def _pinned(job: Job, kind: str) -> dict[str, float]:
    given: Any = job.memory.homes.get(kind, {})  # type: ignore[call-overload]
    shares = given.items() if isinstance(given, dict) else ((given, 1.0),)
    return {home: share for home, share in shares if home != "device"}


def moved_per_parameter(job: Job, plan: Plan) -> dict[str, float]:
    """Bytes of a parameter's states in host memory and on disk, each copied to the device and back in a step."""
    kinds = state_kinds(job, plan.split_master)
    return {
        home: sum(size * plan.shares_of(kind).get(home, 0.0) for kind, size in kinds.items())
        for home in ("host", "disk")
    }  # fmt: skip


def coded_states(job: Job, plan: Plan) -> int:
    """States of a parameter that are stored in fewer bits."""
    if plan.states == "exact":
        return 0
    return int(OPTIMIZERS[job.optim.name].state_per_parameter(job.optim)) + (plan.states == "24bit-master")


def fetched_weights(job: Job, plan: Plan, layouts: Layouts) -> Size:
    """Bytes of weights that each pass over a microbatch fetches from host memory."""
    counts = count_parameters(job.model)
    if counts is None or not plan.weight_share:
        return 0.0 * layouts.tp
    return plan.weight_share * plan.compute_bytes * counts.total / (layouts.tp * layouts.pp)


def state_bytes_per_parameter(job: Job, split: bool) -> float:
    """Bytes of the states of one parameter."""
    return sum(state_kinds(job, split).values())


def state_kinds(job: Job, split: bool) -> dict[str, float]:
    """Bytes of each kind of states of one parameter."""
    numbers = OPTIMIZERS[job.optim.name].state_per_parameter(job.optim)
    side = 4096
    moments = float(stored_bytes(job.memory.states, numbers * side * side, side * side, (side, side))) / side**2
    return {
        "moments": moments, "master": low_half_bytes(job.memory.states) if split else 0,
        "averages": 4 if job.train.ema else 0,
    }  # fmt: skip


def _piece_bytes(job: Job, split: bool, world: int) -> float:
    """Bytes of the states that are copied to the device together, at most."""
    counts = count_parameters(job.model)
    if counts is None:
        return 0.0
    return float(piece_elements(job, world, counts.total / world)) * state_bytes_per_parameter(job, split)


def place_states(job: Job, plan: Plan, limit_gib: float, spare: bool, reasons: list[str]) -> Plan:
    """The plan with the homes of its states. With `spare` they stay on the device as far as they fit."""
    layouts = Layouts.one(plan)
    none = replace(plan, host_share=0.0, disk_share=0.0, stream_gib=0.0, weight_share=0.0, gradient_home="device")
    rank = EngineMemory(job, none).group(layouts, Place(0))
    held = {name: float(size[0]) / GIB for name, size in rank.states(rank.held).items()}
    low = held["parameters"] / 4 * low_half_bytes(plan.states) if plan.split_master else 0.0
    sizes = {"master": low, "moments": held["optimizer"], "averages": held["average"]}
    pinned = {
        home: sum(gib * plan.home_shares.get(kind, {}).get(home, 0.0) for kind, gib in sizes.items())
        for home in ("host", "disk")
    }
    total = sum(gib for kind, gib in sizes.items() if kind not in plan.home_shares)
    released = EngineMemory(job, replace(none, gradient_home=plan.gradient_home))
    resident = float(released.peak(layouts)[0]) / GIB
    gone = float(np.max(released.group(layouts, Place(0)).block_gradients())) / GIB
    gradients = gone if plan.gradient_home == "host" else 0.0
    share, least = plan.host_share if total else 0.0, plan.stream_gib
    if spare and share:
        share = min(1.0, max(0.0, (resident + least - limit_gib) / total * MARGIN))
    away = total * share + sum(pinned.values())
    least = min(least, away)
    blocks, largest = (float(np.max(size)) / GIB for size in rank.block_weights())
    excess = resident - away + least - limit_gib
    weights = _weight_share(job, plan, blocks, WEIGHT_UNITS * largest, excess)
    parked = min(plan.host_gib, _block_inputs(job, plan, layouts)) if plan.offloads_activations else plan.host_gib
    inputs = parked if plan.offloads_activations else 0.0
    host, disk = _shares(job, plan, total, share, spare, reasons, pinned, weights * blocks, gradients, inputs)
    left = -excess + max(0.0, weights * blocks - WEIGHT_UNITS * largest)
    stream = min(away, least + max(0.0, STREAM_SHARE * left)) if away else 0.0
    masters = 0.0 if plan.split_master else held["parameters"]
    parts = {"weights": held["copies"] + held["frozen"], "master weights": masters}
    of_blocks = {
        "weights": weights * blocks * parts["weights"] / max(1e-9, sum(parts.values())),
        "master weights": weights * blocks * masters / max(1e-9, sum(parts.values())),
    }
    rows = [_row(k, "device", gib - of_blocks[k]) for k, gib in parts.items() if gib - of_blocks[k] > 1e-9]
    rows.append(_row("gradients", "device", held["gradients"] - gone))
    if gradients:
        rows.append(_row("gradients", "host", gradients, plan.accumulation * gradients, plan.accumulation * gradients))
    passes = 2 * plan.accumulation * max(0.0, 1 - WEIGHT_UNITS * largest / max(1e-9, weights * blocks))
    rows += [
        _row(k, "host", gib, passes * gib if k == "weights" or not parts["weights"] else gib, gib)
        for k, gib in of_blocks.items()
        if gib > 1e-9
    ]
    plan = replace(plan, host_share=host, disk_share=disk, weight_share=weights)
    for home in ("device", "host", "disk"):
        for kind, gib in sizes.items():
            own = plan.shares_of(kind)
            part = own.get(home, 0.0) if home != "device" else 1 - sum(own.values())
            if gib and part > 1e-9:
                moved = gib * part if home != "device" else 0.0
                rows.append(_row(KIND_NAMES.get(kind, kind), home, gib * part, moved, moved))
    if plan.offloads_activations:
        rows.append(_row("block inputs, up to", "host", parked))
    return replace(
        plan, stream_gib=stream, host_gib=parked, homes=tuple(rows), disk=plan.disk if disk or pinned["disk"] else "",
    )  # fmt: skip


KIND_NAMES = {"master": "low halves"}
"""Kinds of states in the rows of a plan, where they differ from those of memory.homes."""


def _block_inputs(job: Job, plan: Plan, layouts: Layouts) -> float:
    """GiB that all blocks of the first rank keep for their backward pass."""
    without_host = job.model_copy(update={"memory": job.memory.model_copy(update={"host_gib": 0.0})})
    rank = EngineMemory(without_host, plan).group(layouts, Place(0))
    return float((rank.kept() * rank.rank.in_flight)[0]) / GIB


def _row(kind: str, home: str, gib: float, moved: float = 0.0, stored: float = 0.0) -> dict[str, Any]:
    """What lives in a memory, and what of it is copied to the device and back in a step."""
    sizes = {"gib": gib, "moved_gib": moved, "stored_gib": stored}
    return {"kind": kind, "home": home, **{key: round(size, 6) for key, size in sizes.items()}}


def _weight_share(job: Job, plan: Plan, blocks: float, slots: float, excess: float) -> float:
    """Share of the blocks' weights, `blocks` GiB, that must live in host memory: as pinned, or so many blocks as free
    `excess` GiB. `slots` GiB of them are on the device at a time."""
    if not plan.weight_share or not blocks:
        return 0.0
    if pinned := _pinned(job, "weights"):
        return pinned.get("host", 0.0)
    if excess <= 0:
        return 0.0
    count = max(1, (job.model.layers or 1) // plan.pp)
    return min(1.0, ceil((excess + slots) / blocks * MARGIN * count) / count)


def _size(gib: float) -> str:
    return f"{gib:.2f}" if gib >= 0.01 or not gib else f"{gib:.1g}"


def _shares(
    job: Job, plan: Plan, total: float, share: float, spare: bool, reasons: list[str], pinned: dict[str, float],
    weights: float, gradients: float, inputs: float,
) -> tuple[float, float]:  # fmt: skip
    """Shares in host memory and on disk of the states that are not pinned, of `total` GiB, beside `pinned` ones and
    some GiB of weights, gradients and block inputs in host memory."""
    host = _host_budget(job, plan.world)
    kinds = {"weights": weights, "gradients": gradients, "block inputs": inputs}
    *most, last = [name for name, gib in kinds.items() if gib] or [""]
    what = f"{', '.join(most)} and {last}" if most else last
    if (weights := weights + gradients + inputs) > host * MARGIN:
        raise FitError(
            f"{what} need {_size(weights)} GiB of host memory a rank, and {_size(host)} GiB may be used "
            "(memory.host_gib, by default 70 % of the machine's memory); more ranks in parallel.tp or parallel.pp "
            "would need less"
        )
    host = max(0.0, host - weights)
    if pinned["host"] > host * MARGIN:
        raise FitError(
            f"memory.homes keeps {_size(pinned['host'])} GiB of states a rank in host memory, and {_size(host)} GiB "
            "may be used (memory.host_gib, by default 70 % of the machine's memory); a smaller share would work"
        )
    if pinned["disk"] > (space := _disk_budget(job, plan, plan.world) if job.memory.disk else 0.0):
        raise FitError(
            f"memory.homes keeps {_size(pinned['disk'])} GiB of states a rank on disk, and "
            f"memory.disk={job.memory.disk} has {_size(space)} GiB for each rank; a smaller share or a larger disk "
            "would work"
        )
    budget = max(0.0, host - pinned["host"])
    if share * total <= budget * MARGIN:
        if 0 < share < 1 and job.memory.offload_fraction == "auto" and not spare:
            reasons.append(
                f"{1 - share:.0%} of the states stay on the device: host memory has {_size(budget)} GiB for the rest"
            )
        return share, 0.0
    host = budget / total
    need = share * total - budget
    if not job.memory.disk:
        raise FitError(
            f"offloaded states need {_size(share * total)} GiB of host memory a rank, and {_size(budget)} GiB may be "
            f"used {f'besides {_size(weights)} GiB of {what} ' if weights else ''}(memory.host_gib, by default 70 % of "
            "the machine's memory); memory.disk=FOLDER would keep the rest on disk"
        )
    free = space - pinned["disk"]
    if need > free:
        raise FitError(
            f"states need {_size(need)} GiB a rank on disk besides {_size(budget)} GiB of host memory, and memory.disk="
            f"{job.memory.disk} has {_size(free)} GiB for each rank; a larger disk or memory.host_gib would work"
        )
    reasons.append(f"{_size(need)} GiB of states are on disk: host memory has {_size(budget)} GiB for them")
    return host, share - host
