"""Traces one microbatch of a person's own module on tensors without data, for its predicted memory and time."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from weft.comm.agreement import error_text
from weft.data.dataset import Dataset, open_dataset
from weft.data.loader import Loader
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.memory.tracer import Tracer
from weft.memory.tracer_internals import fake_tensors
from weft.models.build_model import build_model, loss_sum
from weft.parallel.units import find_units
from weft.planner.module_costs import ModuleFacts, predict_module
from weft.planner.plan import Plan
from weft.precision import COMPUTE_DTYPES


def with_prediction(job: Job, plan: Plan, dataset: Dataset | None = None) -> Plan:
    """The plan of a person's own module with its predicted memory, traffic and time. Where the module needs the values
    of tensors, or its data cannot be read here, the plan gives the reason."""
    if not job.model.module or plan.predicted:
        return plan
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            facts = module_facts(job, plan, dataset or open_dataset(job))
    except Exception as error:  # the run itself reports it, if it is a fault
        why = f"memory and time are not predicted: {error_text(error).strip().partition(chr(10))[0]}"
        return plan if why in plan.reasons else replace(plan, reasons=(*plan.reasons, why))
    return replace(plan, predicted=predict_module(job, plan, facts))


def write_plan(run: RunDir, plan: Plan) -> None:
    """Write plan.json again, with what was predicted."""
    new = run.plan.with_suffix(".new")
    new.write_text(plan.dumps(), encoding="utf-8")
    new.replace(run.plan)


def module_facts(job: Job, plan: Plan, dataset: Dataset) -> ModuleFacts:
    """The facts of one microbatch, forward and backward."""
    size = plan.microbatch
    loader = Loader(dataset, seed=job.train.seed, global_batch=size, microbatch=size, dp_rank=0, dp_size=1, prefetch=0)
    batch = next(iter(loader))[0]
    with fake_tensors() as mode, Tracer() as meter:
        module = build_model(job.model, job.train.seed)
        fake = {name: mode.from_tensor(t) if isinstance(t, Tensor) else t for name, t in batch.items()}
        _call(module, fake, job, plan)  # gradients exist from here on, as in a later step
        meter.start()
        before = meter.live
        _call(module, fake, job, plan)
        meter.stop()
    params = list(module.parameters())
    return ModuleFacts(
        [tuple(p.shape) for p in params if p.requires_grad], sum(p.numel() for p in params if not p.requires_grad),
        len(find_units(module)), meter.peak - before, meter.flops, meter.allocated, meter.operators,
    )  # fmt: skip


def _call(module: nn.Module, batch: dict[str, Any], job: Job, plan: Plan) -> None:
    dtype = COMPUTE_DTYPES[plan.precision]
    loss = loss_sum(module, batch, job.model, seed=job.train.seed, smoothing=job.train.label_smoothing, dtype=dtype)
    loss.backward()
