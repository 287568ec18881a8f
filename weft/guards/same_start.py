"""What all ranks must have in common before they train: each node may have files of its own, and without a supervisor
each rank is started with a job of its own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from weft.data.dataset import DRAW_FROM, Dataset, Sample, fingerprint_of, own_sources
from weft.data.growing import FollowsRounds
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.plan import Plan

SECTIONS = ("model", "train", "optim")
"""Sections of a job that no node may have other values of; paths, for example, may differ."""


def check_same_job(job: Job, plan: Plan, mesh: Mesh) -> None:
    """Refuse jobs that differ between ranks: they would train different runs, or wait for one another."""
    raw = job.model_dump(mode="json")
    mine = {section: raw[section] for section in SECTIONS}
    mine |= {"train.microbatch of the plan": plan.microbatch, "train.accumulation of the plan": plan.accumulation}
    marks = mesh.all_gather_json(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()[:16])
    if (other := _first_other(marks)) is None:
        return
    found = mesh.all_gather_json(mine)
    field, ours, theirs = _difference(found[0], found[other])
    differ = f"{field} is {json.dumps(ours)} on rank 0 and {json.dumps(theirs)} on rank {other}"
    raise JobError(f"the ranks were started with different jobs: {differ}; give all the same job and overrides")


def check_same_data(job: Job, plan: Plan, dataset: Dataset, mesh: Mesh) -> None:
    """Refuse data that differs between ranks."""
    if isinstance(dataset, FollowsRounds):  # checks the shards that the first rank names
        return
    found = mesh.all_gather_json([int(dataset.train_len), int(dataset.val_len), fingerprint_of(dataset)])
    if (other := _first_other(found)) is not None:
        sizes = [f"{train:,} samples to train on and {held:,} held out" for train, held, _ in (found[0], found[other])]
        differ = f"rank 0 has {sizes[0]}, rank {other} {sizes[1]}"
        if sizes[0] == sizes[1]:
            differ = f"ranks 0 and {other} have other contents in as many samples"
        raise JobError(f"data.source {job.data.source} is not the same on all ranks: {differ}; copy one to all nodes")
    _check_same_samples(plan, dataset, mesh)


def _check_same_samples(plan: Plan, dataset: Dataset, mesh: Mesh) -> None:
    """Refuse a user's dataset whose samples differ between ranks. One with a generator of its own may have others on
    every replica, but not on the ranks of one."""
    own, cut = own_sources(dataset), max(plan.tp, plan.cp, plan.pp) > 1
    if not own or mesh.world == 1:
        return
    found = mesh.all_gather_json([[source.varies, _summary(dataset.train(i))] for i, source in own.items()])
    for place, (index, source) in enumerate(own.items()):
        varies, samples = zip(*(theirs[place] for theirs in found), strict=True)
        if any(varies) and not cut:
            continue
        other = next((rank for rank, theirs in enumerate(samples) if not _alike(theirs, samples[0])), None)
        if other is not None:
            raise JobError(
                f"data.source {source.name}: ranks 0 and {other} read different samples train({index}); copy the same "
                f"files to all nodes, and {DRAW_FROM}"
            )


def _summary(sample: Sample) -> dict[str, Any]:
    """Shape, mean and deviation of a sample's arrays."""
    return {
        key: [list(array.shape), float(array.mean()), float(array.std())] if array.size else [list(array.shape), 0, 0]
        for key, array in sample.items()
    }


def _alike(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two summaries are the same but for rounding, which may differ between kinds of processors."""
    return ours.keys() == theirs.keys() and all(
        ours[key][0] == theirs[key][0] and np.allclose(ours[key][1:], theirs[key][1:], 1e-3, 1e-6, equal_nan=True)
        for key in ours
    )


def _first_other(found: list[Any]) -> int | None:
    """The first rank with another value than rank 0."""
    return next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)


def _difference(ours: Any, theirs: Any, name: str = "") -> tuple[str, Any, Any]:
    """The first field in which two jobs differ, and its two values."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        key = next(key for key in ours if ours[key] != theirs[key])
        return _difference(ours[key], theirs[key], f"{name}.{key}" if name else key)
    return name, ours, theirs
