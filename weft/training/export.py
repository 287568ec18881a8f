"""The trained model of a run in one process: loaded for generation, or exported as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.checkpoint.format import SavedCheckpoint, list_checkpoints, newest_good, verify
from weft.checkpoint.reader import Index, load_full, load_named
from weft.checkpoint.writer import write_torch_file
from weft.data.store import is_store
from weft.job.checkpoint import Checkpoint
from weft.job.data_files.token_files import TOKENIZER
from weft.job.errors import JobError, MachineError, check_output_file
from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import explain
from weft.job.import_by_name import find_object
from weft.job.interchange import EXPORT_FORMATS
from weft.job.load import parse_job, read_fields
from weft.job.model import FAMILIES
from weft.job.schema import Job
from weft.job.shapes import first_source
from weft.models.build_model import build_model, meta_model
from weft.planner.model.counts import count_parameters
from weft.training.weight_shards import save_tensors, write_shards


def newest(run: RunDir) -> SavedCheckpoint:
    """The newest good checkpoint of a run."""
    section = read_fields(str(run.job)).get("checkpoint") or {}
    folder = run.checkpoints_in(Checkpoint.model_validate(section).to)
    try:
        found = newest_good(folder)
    except OSError as error:
        raise MachineError(f"{folder} cannot be read: {explain(error)}") from None
    if found is None and folder != run.checkpoints:
        found = newest_good(run.checkpoints)  # trained or imported before checkpoint.to was set
    if found is None:
        damaged = [
            f"; {path.name} is damaged: {why}" for path in list_checkpoints(folder)[-1:] if (why := verify(path))
        ]
        raise JobError(f"{run.path} has no good checkpoint yet; train it first{''.join(damaged)}")
    return found


def load_params(found: SavedCheckpoint, ema: bool = False) -> dict[str, Tensor]:
    """Every parameter, unsharded, in fp32, by its name in the model."""
    params = {n.removeprefix("model."): _fp32(t) for n, t in load_full(found.path, "model.").items()}
    if not ema:
        return params
    averages = {n.removeprefix("ema."): _fp32(t) for n, t in load_full(found.path, "ema.").items()}
    if not averages:
        raise without_average(found)
    return params | averages  # frozen weights have no average


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def without_average(found: SavedCheckpoint) -> JobError:
    """The error of asking for the averaged weights of a checkpoint without them."""
    return JobError(f"{found.path} holds no moving average; train with train.ema to get one")


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
    if not module and not job.model.family:
        raise JobError(f"{found.path} has an incomplete model in its metadata: it names neither a family nor a module")
    weft_module = FAMILIES[job.model.family].build if job.model.family else None
    if module not in (None, weft_module) and not trust_module and (own is None or own.model.module != module):
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


def tied_copies(job: Job) -> dict[str, str]:
    """The other names of tied parameters, which a checkpoint holds once, with the name in the checkpoint."""
    model = meta_model(job.model)
    names = {id(param): name for name, param in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[id(param)] for name, param in every if names[id(param)] != name}


@dataclass(frozen=True)
class ExportOptions:
    """What `weft export` writes besides the choice of a format."""

    dtype: torch.dtype | None = None
    """None: as the format has it, which is fp32 under Weft's own names."""
    shard_bytes: int | None = None
    """Largest size of a file. None: as the format has it, which is one file under Weft's own names."""
    ema: bool = False


def export_run(
    run: RunDir, found: SavedCheckpoint, to: str, out: Path, options: ExportOptions, own: Job | None = None,
    trust_module: bool = False,
) -> int:  # fmt: skip
    """Export a checkpoint in one of EXPORT_FORMATS; returns the bytes of the weights. `own` is the job that the user
    gave, whose module may be imported."""
    size: int = find_object(EXPORT_FORMATS[to].write, "--to")(run, found, to, out, options, own, trust_module)
    return size


def export_own_names(
    run: RunDir, found: SavedCheckpoint, to: str, out: Path, options: ExportOptions, own: Job | None,
    trust_module: bool,
) -> int:  # fmt: skip
    """Export a checkpoint as safetensors or for torch.load, under Weft's names."""
    copies = tied_copies(saved_job(found, own, trust_module)) if to == "torch" else None
    return export_file(found, to, out, options, copies)


def tokenizer_file(job: Job) -> Path | None:
    """The tokenizer.json of a job's data: that of its token store, or data.tokenizer; None for bytes."""
    source = first_source(job.data)
    places = (
        source / TOKENIZER if is_store(source) else Path(job.data.tokenizer),
        Path(job.data.tokenizer) / TOKENIZER,
    )
    return next((path for path in places if path.is_file()), None)


def export_file(
    found: SavedCheckpoint, to: str, out: Path, options: ExportOptions | None = None,
    copies: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """Write every parameter and buffer, unsharded, under Weft's names, with the job in the file's metadata. Each of
    `copies` is another name of a tensor."""
    check_output_file(out, "--out", EXPORT_FORMATS[to].output)
    options = options or ExportOptions()
    index, prefix = Index(found.path), "ema." if options.ema else "model."
    names = [n.removeprefix(prefix) for n in index.tensors if n.startswith(prefix)]
    if not names:
        raise without_average(found)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensor = converted(load_named(index, [name], prefix)[name])
            yield from ((n, tensor) for n in (name, *(copy for copy, of in (copies or {}).items() if of == name)))
        for name, buffer in load_buffers(found).items():
            yield name, converted(buffer) if buffer.is_floating_point() else buffer.contiguous()

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to(options.dtype or torch.promote_types(tensor.dtype, torch.float32)).contiguous()

    def save(held: dict[str, Tensor], path: Path) -> None:
        if to == "torch":
            write_torch_file(path, held)
            return
        save_tensors(held, path, weft_step=str(found.step), job=str(found.meta.get("job", "")))

    out.parent.mkdir(parents=True, exist_ok=True)
    name = out.name if "." in out.name else f"{out.name}.{EXPORT_FORMATS[to].output.rsplit('.', 1)[1]}"
    return write_shards(out.parent, name, tensors(), options.shard_bytes or 2**63, save)
