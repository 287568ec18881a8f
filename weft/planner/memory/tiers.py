"""Homes of states: what stays on the device, what lives in host memory or on disk, and what is copied in a step."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from weft.job.errors import FitError
from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.planner.engine_constants import STREAM_SLOTS, STREAMED_PIECE_ELEMENTS
from weft.planner.memory.disk_space import free_gib
from weft.planner.memory.engine_memory import EngineMemory, Place
from weft.planner.memory.layout_group import GIB, host_gib
from weft.planner.memory.states import low_half_bytes, stored_bytes
from weft.planner.model.counts import count_parameters
from weft.planner.model.parameters import unit_weights
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts

AUTO_OFFLOADS: tuple[dict[str, Any], ...] = (
    {"offload": "none"}, {"offload": "none", "split_master": True}, {"offload": "states"}, {"offload": "all"},
)  # fmt: skip
"""What memory.offload=auto tries, by the time that it costs. The first that fits is taken."""
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


def tier_settings(job: Job, plan: Plan, world: int) -> dict[str, Any]:
    """The plan's fields for the search: as much offloaded as memory.offload allows."""
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
        "home_shares": pinned, "stream_gib": away and STREAM_SLOTS * _piece_bytes(job, split, world) / GIB,
    }  # fmt: skip


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
    return {
        kind: {home: share for home, share in (given.items() if isinstance(given, dict) else ((given, 1.0),))
               if home != "device"}
        for kind, given in job.memory.homes.items()
    }  # fmt: skip


def moved_per_parameter(job: Job, plan: Plan) -> dict[str, float]:
    """Bytes of a parameter's states in host memory and on disk, each copied to the device and back in a step."""
    kinds = state_kinds(job, plan.split_master)
    return {
        home: sum(size * plan.shares_of(kind).get(home, 0.0) for kind, size in kinds.items())
        for home in ("host", "disk")
    }  # fmt: skip


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
    own = counts.total / world
    size = min(STREAMED_PIECE_ELEMENTS, own)
    if world > 1 or not OPTIMIZERS[job.optim.name].elementwise:  # these weights are not cut
        weights = [w for some in unit_weights(job.model, False).values() for w in some]
        size = max(size, max((prod(w.shape) for w in weights), default=0) / world)
    return size * state_bytes_per_parameter(job, split)


def place_states(job: Job, plan: Plan, limit_gib: float, spare: bool, reasons: list[str]) -> Plan:
    """The plan with the homes of its states. With `spare` they stay on the device as far as they fit."""
    if job.model.module:
        return replace(plan, homes=())
    layouts, none = Layouts.one(plan), replace(plan, host_share=0.0, disk_share=0.0, stream_gib=0.0)
    engine = EngineMemory(job, none)
    held = {name: float(size[0]) / GIB for name, size in engine.states(layouts, Place(0)).items()}
    weights = held["copies"] + held["frozen"]
    low = held["parameters"] / 4 * low_half_bytes(plan.states) if plan.split_master else 0.0
    sizes = {"master": low, "moments": held["optimizer"], "averages": held["average"]}
    pinned = {
        home: sum(gib * plan.home_shares.get(kind, {}).get(home, 0.0) for kind, gib in sizes.items())
        for home in ("host", "disk")
    }
    total = sum(gib for kind, gib in sizes.items() if kind not in plan.home_shares)
    resident = float(engine.peak(layouts)[0]) / GIB
    share, least = plan.host_share if total else 0.0, plan.stream_gib
    if spare and share:
        share = min(1.0, max(0.0, (resident + least - limit_gib) / total * MARGIN))
    away = total * share + sum(pinned.values())
    least = min(least, away)
    host, disk = _shares(job, plan, total, share, spare, reasons, pinned)
    left = limit_gib - (resident - share * total + least)
    stream = min(away, least + max(0.0, STREAM_SHARE * left)) if away else 0.0
    parked = max(0.0, plan.host_gib - host * total - pinned["host"]) if plan.offloads_activations else plan.host_gib
    masters = [] if plan.split_master else [("master weights", held["parameters"])]
    fixed = [("weights", weights)] if weights else []
    rows = [_row(kind, "device", gib) for kind, gib in (*fixed, *masters, ("gradients", held["gradients"]))]
    plan = replace(plan, host_share=host, disk_share=disk)
    for home in ("device", "host", "disk"):
        for kind, gib in sizes.items():
            own = plan.shares_of(kind)
            part = own.get(home, 0.0) if home != "device" else 1 - sum(own.values())
            if gib and part > 1e-9:
                rows.append(_row(KIND_NAMES.get(kind, kind), home, gib * part, home != "device"))
    if plan.offloads_activations:
        rows.append(_row("block inputs, up to", "host", parked))
    return replace(
        plan, stream_gib=stream, host_gib=parked, homes=tuple(rows), disk=plan.disk if disk or pinned["disk"] else "",
    )  # fmt: skip


KIND_NAMES = {"master": "low halves"}
"""Kinds of states in the rows of a plan, where they differ from those of memory.homes."""


def _row(kind: str, home: str, gib: float, moved: bool = False) -> dict[str, Any]:
    return {"kind": kind, "home": home, "gib": round(gib, 6), "moved_gib": round(gib, 6) if moved else 0.0}


def _shares(
    job: Job, plan: Plan, total: float, share: float, spare: bool, reasons: list[str], pinned: dict[str, float]
) -> tuple[float, float]:
    """Shares in host memory and on disk of the states that are not pinned, of `total` GiB, beside `pinned` ones."""
    host = _host_budget(job, plan.world)
    if pinned["host"] > host * MARGIN:
        raise FitError(
            f"memory.homes keeps {pinned['host']:.2f} GiB of states a rank in host memory, and {host:.2f} GiB may be "
            "used (memory.host_gib, by default 70 % of the machine's memory); a smaller share would work"
        )
    if pinned["disk"] > (space := _disk_budget(job, plan, plan.world) if job.memory.disk else 0.0):
        raise FitError(
            f"memory.homes keeps {pinned['disk']:.2f} GiB of states a rank on disk, and memory.disk={job.memory.disk} "
            f"has {space:.2f} GiB for each rank; a smaller share or a larger disk would work"
        )
    budget = max(0.0, host - pinned["host"])
    if share * total <= budget * MARGIN:
        if 0 < share < 1 and job.memory.offload_fraction == "auto" and not spare:
            reasons.append(
                f"{1 - share:.0%} of the states stay on the device: host memory has {budget:.2f} GiB for the rest"
            )
        return share, 0.0
    host = budget / total
    need = share * total - budget
    if not job.memory.disk:
        raise FitError(
            f"offloaded states need {share * total:.2f} GiB of host memory a rank, and {budget:.2f} GiB may be used "
            "(memory.host_gib, by default 70 % of the machine's memory); memory.disk=FOLDER would keep the rest on disk"
        )
    free = space - pinned["disk"]
    if need > free:
        raise FitError(
            f"states need {need:.2f} GiB a rank on disk besides {budget:.2f} GiB of host memory, and memory.disk="
            f"{job.memory.disk} has {free:.2f} GiB for each rank; a larger disk or memory.host_gib would work"
        )
    reasons.append(f"{need:.2f} GiB of states are on disk: host memory has {budget:.2f} GiB for them")
    return host, share - host
