"""Functions that tests of compressed gradients run on ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.comm_axis import everyone
from helpers.on_ranks import Planned, begin, wholes
from weft.checkpoint.checkpointer import Checkpointer
from weft.comm.compression.codec_base import RoundingNoise
from weft.comm.compression.codecs import Codecs, codecs_of
from weft.comm.compression.compressed_sum import gather_encoded, scatter_sum, sum_all
from weft.comm.compression.encoded_rounds import sum_encoded
from weft.comm.shards import local_of
from weft.data.loader import Loader, to_device
from weft.data.open_dataset import open_dataset
from weft.job.compression import parse_compression
from weft.job.schema import Job
from weft.training.optional_state import load_amax_history, load_residuals
from weft.verify.traced_run import join_stages, join_tensors


def numbers(rank: int, rows: int, n: int) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(rank))


def sums(settings: list[str], n: int) -> dict[str, Any]:
    """For each setting the three sums of all ranks' numbers, the residuals and the counters."""
    axis = everyone()
    out = {}
    for setting in settings:
        codec = codecs_of(parse_compression(setting)).gradients
        assert codec is not None
        rounding = RoundingNoise(axis.rank, torch.device("cpu"))
        axis.reset()
        x = numbers(axis.rank, axis.size, n)
        scattered = scatter_sum(axis, codec, x.clone(), rounding)
        one = axis.read()
        gathered = gather_encoded(axis, codec, x[0].clone(), rounding)
        axis.reset()
        reduced = sum_all(axis, codec, x.flatten().clone(), rounding)
        out[setting] = {
            "scattered": scattered, "gathered": gathered, "reduced": reduced, "counted": one, "both": axis.read()
        }  # fmt: skip
    return out


def message_sums(settings: list[str], counts: list[int], near: int) -> dict[str, Any]:
    """For each setting, algorithm and size the sum by messages, what was not sent, and the bytes that were."""
    axis = everyone()
    out: dict[str, Any] = {}
    for setting in settings:
        codec = codecs_of(parse_compression(setting)).gradients
        assert codec is not None
        for algorithm in ("ring", "tree", "hierarchical"):
            for n in counts:
                axis.reset()
                x, rounding = numbers(axis.rank, 1, n)[0], RoundingNoise(axis.rank, torch.device("cpu"))
                missing = sum_encoded(axis, codec, x, rounding, algorithm, near)
                out[f"{setting} {algorithm} {n}"] = (x, missing, axis.bytes["send"])
    return out


def journey(
    job: Job | Planned, steps: int, folder: str | None = None, bare: bool = False, scales: list[float] | None = None
) -> dict[str, Any]:
    """Continue from a folder's newest checkpoint, if there is one; train; save. `bare` leaves gathered weights alone,
    so that gradients are those of an uncompressed run; `scales` are the loss scales of the steps."""
    job, plan, mesh, stepper, _ = begin(job)
    state, spread_model = stepper.state, stepper.state.model
    checkpoints = Checkpointer(Path(folder or "."), group=mesh.host_group, keep=9, keep_every=0, background=False)
    if folder and checkpoints.newest() is not None:
        found = checkpoints.load_newest(tensors := state.loadable_tensors(saved_world=0))
        assert found is not None
        state.restore(tensors, found.meta)
        load_residuals(checkpoints, found, state)
        load_amax_history(checkpoints, found, state)
    for compressor in spread_model.compressors if bare else []:
        for unit in compressor.units:
            unit.codecs = Codecs(unit.codecs.gradients, None)
    opened = _residual(stepper)
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=plan.microbatch,
        dp_rank=mesh.dp_rank(plan), dp_size=plan.dp, prefetch=0, start_step=state.step,
    )  # fmt: skip
    gradients: dict[str, Tensor] = {}
    taken, residual_after = [], []
    for i, batches in zip(range(steps), loader, strict=False):
        if scales:
            state.scale.value = scales[i]
        grads = stepper.gradients([to_device(b, mesh.device) for b in batches])
        found_now = wholes({n: x.grad for n, x in spread_model.grad_params.items() if x.grad is not None})
        gradients = {n: g / (grads.scale / grads.nominal) for n, g in found_now.items()}
        taken.append(stepper.update(grads, stepper.learning_rate())[1])
        residual_after.append(_residual(stepper))
    if folder:
        checkpoints.save(state.step, state.tensors(), state.meta(job, plan), wait=True)
    bits = {
        n: hashlib.sha256(local_of(m).detach().contiguous().numpy()).hexdigest()
        for n, m in spread_model.master_params.items()
    }
    if steps:
        join_stages(gradients, mesh)
    return {
        "opened": opened, "gradients": gradients, "residual_after": residual_after,
        "taken": taken, "bits": bits, "ways": [c.codecs for k in spread_model.compressors for c in k.units],
    }  # fmt: skip


def _residual(stepper: Any) -> dict[str, Tensor]:
    """The sum of all ranks' residuals of each weight, in units of the summed loss."""
    mesh, residuals = stepper.mesh, stepper.state.model.residuals()
    found = wholes({n: t for n, t in residuals.items() if n.startswith("residual.")})
    join_tensors(found, mesh.everyone, mesh)
    total: dict[str, Tensor] = {}
    for name, value in found.items():
        weight = name.split(".", 2)[2]
        total[weight] = total.get(weight, torch.zeros_like(value)) + value
    return total
