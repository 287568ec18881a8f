"""The estimator: time and memory of layouts. The search, plans, advice and predictions of runs all use it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.hardware.catalog import Device
from weft.hardware.measured import load_measured
from weft.hardware.probe import GIB
from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.planner.calibration import Calibration
from weft.planner.memory.engine_memory import EngineMemory, Place
from weft.planner.memory.framework_memory import framework_memory, stage_memory
from weft.planner.memory.tiers import coded_states, fetched_weights, moved_per_parameter
from weft.planner.model.cluster_facts import ClusterFacts, cluster_facts
from weft.planner.model.counts import count_parameters
from weft.planner.model.model_facts import ModelFacts, model_facts
from weft.planner.model.reference_rate import peak_flops
from weft.planner.own_calibration import own_calibration
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts
from weft.planner.time.compute import peak_flops_by_precision
from weft.planner.time.step import Estimates, estimate
from weft.planner.time.streaming import CODED_IN_KERNEL_NS, CODED_STATE_NS, Links, streamed_step_s


@dataclass(frozen=True)
class Estimator:
    """Estimates layouts of one job on one cluster."""

    model: ModelFacts
    cluster: ClusterFacts
    calibration: Calibration
    engine: EngineMemory | None = None
    """Memory of Weft's engine; without it the memory is that of the calibration's framework."""

    @property
    def limit_gib(self) -> float:
        """Memory of a device that a layout may use."""
        return float(self.cluster.memory_gib * self.calibration.usable)

    def mfu_peak_flops(self, job: Job, plan: Plan) -> float:
        """FLOP/s of a rank that count as an MFU of 1: the catalog's, or the measured rate of a device without an entry,
        such as this machine's processor."""
        return peak_flops(plan, job) or float(peak_flops_by_precision(self.cluster, Layouts.one(plan))[0][0])

    def peak_gib(self, layouts: Layouts) -> NDArray[np.float64]:
        """Memory of the fullest rank of each layout."""
        if self.engine is not None:
            return np.asarray(self.engine.peak(layouts)) / GIB
        return np.asarray(sum(framework_memory(self.model, layouts, self.calibration).values())) / GIB

    def least_gib(self, layouts: Layouts, model: ModelFacts) -> NDArray[np.float64]:
        """Memory that no pipeline split of these layouts stays under; `model` has as few blocks as a stage can have."""
        if self.engine is not None:
            return np.asarray(self.engine.least(layouts)) / GIB
        return replace(self, model=model).peak_gib(layouts)

    def stage_gib(self, layouts: Layouts, index: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """Memory by component of one pipeline rank of each layout."""
        if self.engine is None:
            held = stage_memory(self.model, layouts, self.calibration, index)
        else:
            held = self.engine.rank(layouts, Place(index))
        return {part: bytes_ / GIB for part, bytes_ in held.items()}

    def estimate(self, layouts: Layouts, detail: bool = False) -> Estimates:
        """Time and memory of each layout; with `detail` the memory by component, else only its total."""
        if self.engine is None:
            return estimate(self.model, self.cluster, layouts, self.calibration)
        memory = self.engine.parts(layouts) if detail else {"total": self.engine.peak(layouts)}
        return self._estimate(layouts, memory)

    def estimate_time(self, layouts: Layouts, peak_gib: NDArray[np.float64] | None = None) -> Estimates:
        """The same where the memory is known, or does not matter."""
        return self._estimate(layouts, {"total": np.zeros(len(layouts)) if peak_gib is None else peak_gib * GIB})

    def _estimate(self, layouts: Layouts, memory: dict[str, NDArray[np.float64]]) -> Estimates:
        made = self._times(layouts, memory)
        if self.engine is None:
            return made
        return self._streamed(layouts, self._synchronised(layouts, made, memory))

    def _streamed(self, layouts: Layouts, made: Estimates) -> Estimates:
        """With states or weights outside of the device: as much longer as their copies are not hidden."""
        assert self.engine is not None
        job, plan = self.engine.job, self.engine.plan
        counts = count_parameters(job.model)
        coded = coded_states(job, plan)
        if not (plan.offloads_states or plan.away or coded) or counts is None:
            return made
        cut = layouts.tp * layouts.pp * np.where(layouts.dp_shard > 1, layouts.dp_shard * layouts.cp, 1)
        moved = {home: counts.total / cut * size for home, size in moved_per_parameter(job, plan).items()}
        passes = np.where(layouts.recompute > 0, 4.0, 3.0)
        fetched = layouts.accumulation * fetched_weights(job, plan, layouts)
        if plan.gradient_home == "host":  # fetched for the update, and for every sum but the first
            moved["host"] = moved["host"] + counts.total * np.where(layouts.accumulation > 1, 4.0, 2.0)
        share = (passes - 1) / passes if plan.gradient_home == "released" else 1 / passes
        """Of the step, the passes in which weights are updated."""
        in_kernel = OPTIMIZERS[job.optim.name].coded_in_kernel and plan.states != "bf16"
        coded_ns = (CODED_IN_KERNEL_NS if in_kernel else CODED_STATE_NS)[plan.device]
        coded_s = coded * coded_ns * 1e-9 * counts.total / cut
        forward = (made.step_time_s * share + coded_s) if plan.lazy_update else 0.0
        links = Links.of(load_measured(plan.device_name), plan.device)
        seconds = streamed_step_s(
            made.step_time_s + coded_s, forward, moved["host"], moved["disk"], plan.stream_gib * GIB, links, fetched
        )
        return replace(made, copies=seconds - made.step_time_s)

    def _times(self, layouts: Layouts, memory: dict[str, NDArray[np.float64]]) -> Estimates:
        return estimate(self.model, self.cluster, layouts, self.calibration, memory)

    def _synchronised(self, layouts: Layouts, made: Estimates, memory: dict[str, NDArray[np.float64]]) -> Estimates:
        """Replicas that exchange every few steps: the exchange is spread over the steps between. With predicted sums it
        is waited for a step later."""
        assert self.engine is not None
        plan = self.engine.plan
        if plan.sync == "step":
            return made
        alone = self._times(replace(layouts, dp_replicate=np.ones(len(layouts), np.int64)), memory)
        if plan.sync == "predict":  # the next step overlaps with the sum too, and every step has two updates
            late = np.maximum(0.0, made.step_time_s - 2 * alone.step_time_s)
            return made.scaled((alone.step_time_s + late + made.terms.optimizer) / made.step_time_s)
        spread = alone.step_time_s + np.maximum(0.0, made.step_time_s - alone.step_time_s) / plan.sync_every
        return made.scaled(spread / made.step_time_s)


def make_estimator(
    job: Job, plan: Plan, world: int, device: Device, memory_gib: float, calibration: Calibration | None = None
) -> Estimator:
    """The estimator of a resolved job. `plan` has the settings that a search does not choose."""
    calibration = calibration or own_calibration(job, device)
    if job.memory.budget_gib:
        memory_gib = min(memory_gib, job.memory.budget_gib / calibration.usable)
    cluster = cluster_facts(job, world, device, memory_gib)
    engine = EngineMemory(job, plan) if calibration.name.startswith("weft") else None
    facts = replace(model_facts(job), coded=int(job.memory.activations == "fp8"))
    return Estimator(facts, cluster, calibration, engine)


def run_memory(parts: dict[str, float]) -> dict[str, float]:
    """GiB by component under the names that every run prints."""
    return {
        "memory_gib": sum(parts.values()),
        "states_gib": parts["parameters"] + parts["gradients"] + parts["optimizer"],
        "gathered_gib": parts["communication"],
        "activations_gib": parts["activations"] + parts["temporary"],
        "runtime_gib": parts["runtime"],
    }
