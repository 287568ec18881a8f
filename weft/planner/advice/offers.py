"""Duration and cost of a run on several offers: a cloud on demand, its spot machines, or owned hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from weft.hardware.catalog import Device, catalog, find_device
from weft.hardware.prices import clouds, own_terms
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner.advice.goodput import goodput
from weft.planner.calibration import Calibration
from weft.planner.estimator import make_estimator
from weft.planner.job_estimate import POWER_OVERHEAD, POWER_SHARE
from weft.planner.make_plan import PlanStart, start_plan
from weft.planner.model.counts import count_parameters
from weft.planner.own_calibration import own_calibration
from weft.planner.search.branch_and_bound import LayoutSearch
from weft.planner.search.choose import plan_space

SPOT_PREEMPTIONS_PER_DAY = 0.2
"""Preemptions of a spot node per day, if the job does not set cluster.failures.preemptions_per_day."""
OWNED_HARDWARE = ("own", "owned")


@dataclass(frozen=True)
class Offer:
    """One offer and the run on it."""

    name: str
    device: str
    usd_hour: float
    spot: bool
    layout: str
    fits: bool
    step_time_s: float = 0.0
    goodput: float = 0.0
    days: float = 0.0
    usd: float = 0.0
    kwh: float = 0.0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "offer": self.name, "device": self.device, "usd_per_device_hour": self.usd_hour, "spot": self.spot,
            "fits": self.fits, "layout": self.layout, "step_time_s": self.step_time_s, "goodput": self.goodput,
            "days": self.days, "cost_usd": self.usd, "energy_kwh": self.kwh, "note": self.note,
        }  # fmt: skip


def compare_offers(start: PlanStart, names: list[str], calibration: Calibration) -> list[Offer]:
    """Plan the job on each offer, written NAME, NAME:spot, NAME:DEVICE or NAME:DEVICE:spot."""
    return [_plan_offer(start, name, calibration) for name in names]


def _plan_offer(start: PlanStart, text: str, calibration: Calibration) -> Offer:
    name, *rest = text.split(":")
    spot = "spot" in rest
    asked = next((word for word in rest if word != "spot"), None)
    device = find_device(asked, start.job.cluster.catalog) if asked else start.device
    price, note = _price(start.job, name, device, spot)
    nodes, per_node = start.job.cluster.nodes, start.world // start.job.cluster.nodes
    failures = start.job.cluster.failures
    if spot and failures.preemptions_per_day == 0:
        failures = failures.model_copy(update={"preemptions_per_day": SPOT_PREEMPTIONS_PER_DAY})
    changed = {"device": device.name, "devices_per_node": per_node, "failures": failures, "price_usd_hour": price}
    if asked:
        changed |= {"memory_gib": None, "network": "auto"}
    job = start.job.model_copy(update={"cluster": start.job.cluster.model_copy(update=changed)})
    tried = start_plan(job)
    if tried.device != start.device:
        calibration = own_calibration(job, tried.device)
    estimator = make_estimator(tried.job, tried.plan, tried.world, tried.device, tried.memory_gib, calibration)
    found = LayoutSearch(plan_space(tried.job, tried.plan, tried.world), estimator).find()
    shown = Offer(text, device.name, price, spot, "", False, note=note)
    if len(found) == 0:
        return replace(
            shown, note=f"needs {found.smallest_gib:.1f} of {estimator.limit_gib:.1f} GiB", layout="none fits"
        )
    seconds = float(found.times[0])
    counts = count_parameters(job.model)
    kept = goodput(failures, tried.world, nodes, counts.total if counts else 0, seconds, job.checkpoint.background)
    hours = seconds / kept.share * job.train.full_steps / 3600
    return replace(
        shown, fits=True, layout=found.layouts.plan(0, tried.plan).layout(), step_time_s=seconds, goodput=kept.share,
        days=hours / 24, usd=price * tried.world * hours,
        kwh=tried.world * device.tdp_w * POWER_SHARE * POWER_OVERHEAD * hours / 1000,
    )  # fmt: skip


def _price(job: Job, name: str, device: Device, spot: bool) -> tuple[float, str]:
    mine = catalog(job.cluster.catalog)
    if name in OWNED_HARDWARE:
        return _owned_price(device, {**own_terms(), **mine.own})
    known = {**clouds(), **mine.clouds}
    if name not in known:
        raise JobError(
            f"--compare: unknown offer {name!r}; known: {', '.join(known)}, own; or add it under `clouds` in a file "
            "and set cluster.catalog to that file"
        )
    if device.name not in known[name]:
        raise JobError(
            f"--compare {name}: no price for {device.name}; it has {', '.join(known[name])} "
            f"(write {name}:{next(iter(known[name]))})"
        )
    listed = known[name][device.name]
    pair = list(listed) if isinstance(listed, list | tuple) else [listed, None]
    price = pair[1] if spot and len(pair) > 1 else pair[0]
    if price is None:
        raise JobError(f"--compare {name}: {device.name} has no {'spot' if spot else 'on-demand'} price")
    return _amount(f"{name}.{device.name}", price), "spot" if spot else "on demand"


def _amount(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise JobError(f"--compare: {key} is {value!r} in your catalog; it must be a number")
    return float(value)


def _owned_price(device: Device, terms: dict[str, Any]) -> tuple[float, str]:
    """Capital cost per hour of use, plus power."""
    for key in ("years", "utilisation", "usd_kwh"):
        if _amount(f"own.{key}", terms[key]) == 0 and key != "usd_kwh":
            raise JobError(f"--compare own: own.{key} is 0 in your catalog; it must be above 0")
    capital = terms["capital_usd"]
    each = capital.get(device.name) if isinstance(capital, dict) else capital
    if each is None:
        raise JobError(
            f"--compare own: the price of a {device.name} is not known; write own: {{capital_usd: …}} in a file and "
            "set cluster.catalog to that file"
        )
    hours = terms["years"] * 8760 * terms["utilisation"]
    power = device.tdp_w / 1000 * POWER_SHARE * POWER_OVERHEAD * terms["usd_kwh"]
    each = _amount("own.capital_usd", each)
    note = f"{each:,.0f} USD over {terms['years']:g} years, {terms['usd_kwh']:g} USD a kWh"
    return each / hours + power, note
