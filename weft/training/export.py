"""The trained model of a run in one process: loaded for generation, or exported as one file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from weft.checkpoint.format import SavedCheckpoint, newest_good
from weft.checkpoint.reader import Index, load_full
from weft.job.errors import JobError
from weft.job.load import parse_job
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.models.build_model import build_model
from weft.planner.model.counts import count_parameters


def newest(run: RunDir) -> SavedCheckpoint:
    """The newest good checkpoint of a run."""
    found = newest_good(run.checkpoints)
    if found is None:
        raise JobError(f"{run.path} has no good checkpoint yet; train it first")
    return found


def load_params(found: SavedCheckpoint, ema: bool = False) -> dict[str, Tensor]:
    """Every parameter, unsharded, by its name in the model."""
    prefix = "ema." if ema else "model."
    params = {n.removeprefix(prefix): t for n, t in load_full(found.path, prefix).items()}
    if not params:
        raise JobError(f"{found.path} holds no moving average; train with train.ema to get one")
    return params


def load_buffers(found: SavedCheckpoint) -> dict[str, Tensor]:
    """Every buffer that the model saves, such as running statistics."""
    return {n.removeprefix("buffer."): t for n, t in load_full(found.path, "buffer.").items()}


def saved_job(found: SavedCheckpoint, own: Job | None = None, trust_module: bool = False) -> Job:
    """The job in a checkpoint's metadata, which anyone may have written. A module that it names is refused unless
    `own`, the job that the user gave, names it too, or it is trusted; its sizes must be those of the tensors."""
    raw = found.meta.get("job")
    if not isinstance(raw, dict):
        raise JobError(f"{found.path} has no job in its metadata; use a checkpoint of `weft train`")
    job = parse_job(raw)
    module = job.model.module
    if module and not trust_module and (own is None or own.model.module != module):
        raise JobError(
            f"{found.path} names the module {module!r}, and the run's job.yaml does not: code is imported only from "
            "your own job; --trust-module imports it"
        )
    _check_sizes(found, job)
    return job


def _check_sizes(found: SavedCheckpoint, job: Job) -> None:
    """Refuse metadata of another model than the tensors' before anything is built from it."""
    if job.model.module:
        return
    sizes = [entry.size.numel() for name, entry in Index(found.path).tensors.items() if name.startswith("model.")]
    try:
        counts = count_parameters(job.model)
        expected = counts.total if counts is not None else None
    except (TypeError, ValueError) as error:
        raise JobError(f"{found.path} has an incomplete model in its metadata: {error}") from error
    if expected != sum(sizes) or (job.model.layers or 0) > len(sizes):
        raise JobError(
            f"{found.path} describes a model of {expected} parameters in {job.model.layers} layers and holds "
            f"{sum(sizes)} in {len(sizes)} tensors: its metadata does not belong to them"
        )


def load_model(found: SavedCheckpoint, job: Job, ema: bool = False) -> nn.Module:
    """The trained model of a checkpoint, in evaluation mode; `job` is its saved_job()."""
    model = build_model(job.model, job.train.seed)
    params = load_params(found, ema)
    names = {id(p): n for n, p in model.named_parameters()}
    try:
        for name, param in model.named_parameters(remove_duplicate=False):
            params.setdefault(name, params[names[id(param)]])  # tied parameters are saved once
        model.load_state_dict(params | load_buffers(found), strict=True, assign=True)
    except (KeyError, RuntimeError) as error:
        raise JobError(f"{found.path} does not hold the tensors of the model in its metadata: {error}") from error
    return model.eval()


def export_safetensors(found: SavedCheckpoint, to: Path, ema: bool = False, dtype: torch.dtype | None = None) -> Path:
    """Write every parameter and buffer, unsharded, to one file, with the job in its metadata."""
    from safetensors.torch import save_file

    if to.exists() and not to.is_file():
        raise JobError(f"--out {to} exists and is not a regular file; name a new file such as model.safetensors")

    def cast(tensor: Tensor) -> Tensor:
        return (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous()

    tensors = {n: cast(t) for n, t in (load_params(found, ema) | load_buffers(found)).items()}
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = to.with_name(to.name + ".tmp")
    job = str(found.meta.get("job", ""))
    save_file(tensors, temporary, metadata={"format": "pt", "weft_step": str(found.step), "job": job})
    temporary.replace(to)
    return to
