"""The trained model of a run in one process: loaded for generation, or exported as files."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint.format import WEIGHTS_ONLY, SavedCheckpoint, list_checkpoints, newest_good, verify
from weft.checkpoint.reader import Index, load_full, load_named
from weft.checkpoint.writer import write_torch_file
from weft.data.chat.template import load_template
from weft.data.sources import open_tokenizer
from weft.data.store import is_store
from weft.data.tokenizer import load_tokenizer
from weft.job.checkpoint import Checkpoint
from weft.job.errors import JobError, MachineError, check_output_file
from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import explain
from weft.job.import_by_name import find_object
from weft.job.load import parse_job, read_fields
from weft.job.model import FAMILIES
from weft.job.schema import Job
from weft.job.shapes import first_source
from weft.models.build_model import build_model, meta_model
from weft.planner.model.counts import count_parameters
from weft.pretrained.adapters import base_model, merged, write_adapters
from weft.pretrained.checkpoint_folder import CONFIG, SIDE_FOLDER, TOKENIZER, existing_folder, read_json
from weft.pretrained.clip_family import with_sizes
from weft.pretrained.tensor_dtypes import dtype_of, read_dtypes
from weft.pretrained.writer import save_tensors, write_checkpoint_folder, write_shards
from weft.training.interchange.foreign_export import MOMENTS, WRITERS, ExportedModel, write_foreign
from weft.training.interchange.model_card import CARD, is_model_card, model_card

FILES = {"safetensors": "model.safetensors", "torch": "model.pt", "hf": "hf", "peft": "peft"} | {n: n for n in WRITERS}
"""By format, the default name of the export in the run's folder: a file for the first two, else a folder."""
SHARD_BYTES = 5 * 10**9
"""Size of the files of an hf export, unless another is given."""


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
        raise _without_average(found)
    return params | averages  # frozen weights have no average


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _without_average(found: SavedCheckpoint) -> JobError:
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
    """None: each tensor of hf as in the checkpoint that the run started from, else fp32."""
    shard_bytes: int | None = None
    """Largest size of a file. None: one file, or SHARD_BYTES for hf."""
    ema: bool = False


def export_run(
    run: RunDir, found: SavedCheckpoint, to: str, out: Path, options: ExportOptions, own: Job | None = None,
    trust_module: bool = False,
) -> int:  # fmt: skip
    """Export a checkpoint in a format of FILES; returns the bytes of the weights. `own` is the job that the user gave,
    whose module may be imported."""
    if to == "safetensors":
        return export_file(found, to, out, options)
    if to == "torch":
        return export_file(found, to, out, options, tied_copies(saved_job(found, own, trust_module)))
    _check_folder(out)
    job = saved_job(found, own, trust_module)
    model = job.model
    is_user_module = bool(model.module) and not (to == "hf" and model.towers)
    written = model.takes_tokens or model.takes_patches or model.towers if to == "hf" else model.continues_text
    if is_user_module or not written:
        what = job.model.module or f"model.family={job.model.family}"
        kinds = "language models, vit and clip" if to == "hf" else "language models"
        raise JobError(f"--to {to} writes {kinds}, and this run trains {what}; --to safetensors would work")
    if to in WRITERS:
        return _export_foreign(run, job, found, to, out, options)
    return (_export_hf if to == "hf" else _export_peft)(run, job, found, out, options)


class _Tensors:
    """The parameters and buffers of a checkpoint, read one at a time; with `ema` the averages where there are some."""

    def __init__(self, found: SavedCheckpoint, ema: bool):
        self.index = Index(found.path)
        if ema and not any(name.startswith("ema.") for name in self.index.tensors):
            raise _without_average(found)
        order = ("ema.", "model.", "buffer.") if ema else ("model.", "buffer.")
        self.prefixes = {
            name.removeprefix(prefix): prefix
            for prefix in reversed(order)
            for name in self.index.tensors
            if name.startswith(prefix)
        }

    def dtypes(self) -> dict[str, torch.dtype]:
        """The data type of each of them in the checkpoint."""
        return {n: self.index.tensors[f"{p}{n}"].properties.dtype for n, p in self.prefixes.items()}

    def load(self, name: str) -> Tensor:
        if name not in self.prefixes:
            raise JobError(f"{self.index.path} does not hold {name}, which the model in its metadata has")
        return load_named(self.index, [name], self.prefixes[name])[name]


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise JobError(f"--out {out} exists and is not a folder; name a new folder such as my-model")
    if out.exists() and any(out.iterdir()) and not is_model_card(out / CARD):
        raise JobError(f"--out {out} holds other files; name a new folder such as my-model")


def _export_peft(run: RunDir, job: Job, found: SavedCheckpoint, out: Path, options: ExportOptions) -> int:
    if job.model.lora is None:
        raise JobError(f"--to peft writes adapters, and {run.path} trains all weights; --to hf would work")
    tensors = _Tensors(found, options.ema)
    return write_adapters(
        out, job.model, tensors.load, set(tensors.prefixes), original=_original(job), dtype=options.dtype,
        base=job.model.pretrained or "", card=model_card(run, job, found.step, "peft"),
    )  # fmt: skip


def _original(job: Job) -> dict[str, Any] | None:
    """The config of the checkpoint that a run started from."""
    source = existing_folder(job.model.pretrained)
    return read_json(source / CONFIG) if source else None


def tokenizer_file(job: Job) -> Path | None:
    """The tokenizer.json of a job's data: that of its token store, or data.tokenizer; None for bytes."""
    source = first_source(job.data)
    places = (
        source / TOKENIZER if is_store(source) else Path(job.data.tokenizer),
        Path(job.data.tokenizer) / TOKENIZER,
    )
    return next((path for path in places if path.is_file()), None)


def _export_hf(run: RunDir, job: Job, found: SavedCheckpoint, out: Path, options: ExportOptions) -> int:
    source = existing_folder(job.model.pretrained)
    tokenizer = tokenizer_file(job)
    opened = open_tokenizer(job.data) if tokenizer else None
    template = None
    if opened and job.data.template:
        template = load_template(str(tokenizer), job.data.template, opened.decode_special(opened.eos))
    tensors, lora, model = _Tensors(found, options.ema), job.model.lora, base_model(job.model)
    held = set(tensors.prefixes)
    if model.towers:
        model = with_sizes(model, open_tokenizer(job.data).eos)

    def load(names: list[str]) -> dict[str, Tensor]:
        return {n: tensors.load(n) if lora is None else merged(n, lora, tensors.load, held) for n in names}

    if model.family and (export := FAMILIES[model.family].export):
        size: int = find_object(export, "model.family")(
            out, model, load, load_buffers(found), dtype=options.dtype, shard_bytes=options.shard_bytes or SHARD_BYTES,
            folder=source, tokenizer=tokenizer, card=model_card(run, job, found.step),
        )  # fmt: skip
        return size

    dtypes = read_dtypes(source or run.path / SIDE_FOLDER, model)
    if not dtypes and found.meta.get(WEIGHTS_ONLY):  # imported by a version that kept them in the checkpoint alone
        dtypes = tensors.dtypes()
    return write_checkpoint_folder(
        out, model, meta_model(model), load, dtype=options.dtype,
        came_in=lambda tensor: dtype_of(tensor, dtypes),
        shard_bytes=options.shard_bytes or SHARD_BYTES, original=_original(job),
        side_files=source or run.path / SIDE_FOLDER,
        tokenizer=tokenizer, eos=opened.eos if opened else None, template=template,
        card=model_card(run, job, found.step),
    )  # fmt: skip


def _export_foreign(run: RunDir, job: Job, found: SavedCheckpoint, to: str, out: Path, options: ExportOptions) -> int:
    tensors, lora, model = _Tensors(found, options.ema), job.model.lora, base_model(job.model)
    held, index = set(tensors.prefixes), tensors.index

    def load(name: str) -> Tensor:
        return tensors.load(name) if lora is None else merged(name, lora, tensors.load, held)

    def load_moment(name: str, kind: str) -> Tensor:
        return load_named(index, [f"{name}.{kind}"], "optim.")[f"{name}.{kind}"]

    adam = lora is None and all(f"optim.{n}.{kind}" in index.tensors for n in _trained(tensors) for kind in MOMENTS)
    exported = ExportedModel(model, found.step, load, load_moment if adam else None, options.dtype)
    with _put_in_place(out) as draft:
        size = write_foreign(draft, to, exported)
        (draft / CARD).write_text(model_card(run, job, found.step, to), encoding="utf-8")
        if job.data.tokenizer and (tokenizer := Path(job.data.tokenizer)).is_file():
            load_tokenizer(str(tokenizer))  # a checkpoint's metadata may name any file: only a tokenizer is copied
            shutil.copyfile(tokenizer, draft / TOKENIZER)
    return size


@contextmanager
def _put_in_place(out: Path) -> Iterator[Path]:
    """A folder whose files are moved to `out` at the end; a failed export leaves an earlier one as it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        yield draft
        for path in [p for p in draft.rglob("*") if p.is_file()]:
            target = out / path.relative_to(draft)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _trained(tensors: _Tensors) -> list[str]:
    return [name for name, prefix in tensors.prefixes.items() if prefix != "buffer."]


def export_file(
    found: SavedCheckpoint, to: str, out: Path, options: ExportOptions | None = None,
    copies: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """Write every parameter and buffer, unsharded, under Weft's names, with the job in the file's metadata. Each of
    `copies` is another name of a tensor."""
    check_output_file(out, "--out", FILES[to])
    options = options or ExportOptions()
    index, prefix = Index(found.path), "ema." if options.ema else "model."
    names = [n.removeprefix(prefix) for n in index.tensors if n.startswith(prefix)]
    if not names:
        raise _without_average(found)

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
    name = out.name if "." in out.name else f"{out.name}.{FILES[to].rsplit('.', 1)[1]}"
    return write_shards(out.parent, name, tensors(), options.shard_bytes or 2**63, save)
