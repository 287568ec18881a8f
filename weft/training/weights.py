"""A run's weights in one process: for generation and export."""

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


def load_weights(found: SavedCheckpoint, ema: bool = False) -> dict[str, Tensor]:
    """Every weight whole, by the model's own names."""
    prefix = "ema." if ema else "model."
    weights = {n.removeprefix(prefix): t for n, t in load_full(found.path, prefix).items()}
    if not weights:
        raise JobError(f"{found.path} holds no moving average; set train.ema to keep one")
    return weights


def load_buffers(found: SavedCheckpoint) -> dict[str, Tensor]:
    """What else a module of one's own keeps, such as running statistics."""
    return {n.removeprefix("buffer."): t for n, t in load_full(found.path, "buffer.").items()}


def load_model(found: SavedCheckpoint, ema: bool = False) -> tuple[Job, nn.Module]:
    """The trained model on one device, ready to use."""
    job = parse_job(found.meta["job"])
    model = build_model(job.model, job.train.seed)
    weights = load_weights(found, ema)
    tied = {n: p for n, p in model.named_parameters(remove_duplicate=False) if n not in weights}
    names = {id(p): n for n, p in model.named_parameters()}
    weights |= {n: weights[names[id(p)]] for n, p in tied.items()}
    model.load_state_dict(weights | load_buffers(found), strict=True, assign=True)
    return job, model.eval()


def export_safetensors(found: SavedCheckpoint, to: Path, ema: bool = False, dtype: torch.dtype | None = None) -> Path:
    """One file with every weight and buffer whole; the job travels in its metadata."""
    from safetensors.torch import save_file

    def cast(tensor: Tensor) -> Tensor:
        return (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous()

    weights = {n: cast(t) for n, t in (load_weights(found, ema) | load_buffers(found)).items()}
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = to.with_name(to.name + ".tmp")
    save_file(
        weights, temporary, metadata={"format": "pt", "weft_step": str(found.step), "job": str(found.meta["job"])}
    )
    temporary.replace(to)
    return to
