"""The trained model of a run in one process: loaded for generation, or exported as one file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from weft.checkpoint.format import SavedCheckpoint, newest_good
from weft.checkpoint.reader import load_full
from weft.job.errors import JobError
from weft.job.load import parse_job
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.models.build_model import build_model


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


def load_model(found: SavedCheckpoint, ema: bool = False) -> tuple[Job, nn.Module]:
    """The job of a checkpoint and its trained model, in evaluation mode."""
    job = parse_job(found.meta["job"])
    model = build_model(job.model, job.train.seed)
    params = load_params(found, ema)
    tied = {n: p for n, p in model.named_parameters(remove_duplicate=False) if n not in params}
    names = {id(p): n for n, p in model.named_parameters()}
    params |= {n: params[names[id(p)]] for n, p in tied.items()}
    model.load_state_dict(params | load_buffers(found), strict=True, assign=True)
    return job, model.eval()


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
    save_file(
        tensors, temporary, metadata={"format": "pt", "weft_step": str(found.step), "job": str(found.meta["job"])}
    )
    temporary.replace(to)
    return to
