"""Functions that tests of train.sync run on ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from helpers.on_ranks import Planned, begin, wholes
from weft.checkpoint.checkpointer import Checkpointer
from weft.comm.compression.compressed_sum import sum_all
from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset
from weft.guards.guards import Guards
from weft.job.schema import Job
from weft.mesh import connect
from weft.parallel.data.local_sgd import CODECS
from weft.planner import make_plan
from weft.verify.traced_run import join_stages


def train_to(
    job: Job | Planned, last: int, folder: str = "", saves: Sequence[int] = ()
) -> tuple[dict[str, Tensor], list[int]]:
    """Train from the newest checkpoint of a folder, or from the start; save after some steps. Returns the replica's
    whole state and the bytes of each step's exchange."""
    job, plan, mesh, stepper, _ = begin(job)
    state = stepper.state
    checkpoints = Checkpointer(Path(folder), group=mesh.disk_group, keep=9, keep_every=0, background=False)
    if folder and checkpoints.newest() is not None:
        tensors = state.loadable_tensors(saved_world=0)
        found = checkpoints.load_newest(tensors)
        assert found is not None
        checkpoints.load(found, state.replica_tensors(found.meta))
        state.restore(tensors, found.meta)
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=plan.microbatch,
        dp_rank=mesh.dp_rank(plan), dp_size=plan.dp, prefetch=0, start_step=state.step,
    )  # fmt: skip
    sent = []
    while state.step < last:
        stepper.update(stepper.gradients(next(loader)), stepper.learning_rate())
        sent.append(state.rounds.figures().get("sync_bytes", 0))
        if state.step in saves:
            checkpoints.save(state.step, state.saved(), state.meta(job, plan), wait=True)
    held = wholes({n: t for n, t in state.tensors().items() if not n.startswith(("random", "outer.tokens"))})
    join_stages(held, mesh)
    mesh.barrier()
    return held, sent


def watched(job: Job | Planned) -> dict[tuple[str, ...], list[tuple[int, ...]]]:
    """Groups of ranks that the guards treat as holding the same weights."""
    job, plan, mesh, stepper, _ = begin(job)
    guards = Guards(job, plan, mesh, stepper.state, lambda kind, **fields: None, lambda text: None)
    return guards.weights.same_shards


def quantized_sums(size: int, kind: str) -> tuple[Tensor, Tensor, int]:
    """The sum of a tensor over all ranks, quantized and exact, and the bytes that this rank sent."""
    world = int(os.environ["WORLD_SIZE"])
    raw = {"cluster": {"device": "cpu"}, "parallel": {"dp_replicate": -1}, "train": {"global_batch": world}}
    plan = make_plan(Job.model_validate(raw), world)[1]
    axis = connect(plan).axes["dp_replicate"]
    values = torch.randn(size, generator=torch.Generator().manual_seed(axis.rank)) * 10 ** (axis.rank - 1)
    output = sum_all(axis, CODECS[kind], values, None)[0]
    sent = sum(axis.bytes.values())
    return output, axis.all_reduce(values.clone()), sent


def predicted_by_hand(job: Job | Planned, steps: int) -> tuple[Tensor, Tensor]:
    """train.sync=predict on one process with plain SGD: the weights after the averages of all steps but the last, and
    those with the last predicted update."""
    job, _, _, stepper, loader = begin(job)
    params, averages = stepper.state.model.master_params, []
    names, flat = sorted(params), lambda tensors: torch.cat([t.detach().reshape(-1) for t in tensors])
    true = flat(params[n] for n in names)
    used = true.clone()
    for step, batches in zip(range(1, steps + 1), loader, strict=False):
        for n, part in zip(names, used.split([params[n].numel() for n in names]), strict=True):
            params[n].detach().copy_(part.view_as(params[n]))
        grads = stepper.gradients(batches)
        rate = stepper.learning_rate()
        now = flat(params[n].grad for n in names) * grads.factor
        if step > 3:
            true = true - rate * averages[-1]  # the sum of the step before has arrived
        averages.append(now)
        if step < 3:
            true = true - rate * now
            used = true.clone()
        else:
            last, before = averages[-2], averages[-3]
            used = true - rate * (2 * last - before)
    return true, used
