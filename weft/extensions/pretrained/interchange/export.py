"""Exports of a run in the formats of other libraries: folders of transformers, adapters of PEFT, torch DCP, torchtitan,
DeepSpeed and Megatron."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.format import WEIGHTS_ONLY, SavedCheckpoint
from weft.checkpoint.reader import Index, load_named
from weft.data.chat.template import load_template
from weft.data.sources import open_tokenizer
from weft.data.tokenizer import load_tokenizer
from weft.extensions.pretrained.adapters import base_model, merged, write_adapters
from weft.extensions.pretrained.checkpoint_folder import CONFIG, SIDE_FOLDER, TOKENIZER, existing_folder
from weft.extensions.pretrained.clip_family import with_sizes
from weft.extensions.pretrained.interchange.foreign_export import MOMENTS, WRITERS, ExportedModel, write_foreign
from weft.extensions.pretrained.interchange.model_card import CARD, is_model_card, model_card
from weft.extensions.pretrained.tensor_dtypes import dtype_of, read_dtypes
from weft.extensions.pretrained.writer import write_checkpoint_folder
from weft.job.errors import JobError
from weft.job.files.checked_files import read_json
from weft.job.files.run_folder import RunDir
from weft.job.import_by_name import find_object
from weft.job.interchange import implementation_of
from weft.job.schema import Job
from weft.models.build_model import meta_model
from weft.training.export import ExportOptions, load_buffers, saved_job, tokenizer_file, without_average

SHARD_BYTES = 5 * 10**9
"""Size of the files of an hf export, unless another is given."""


def export_folder(
    run: RunDir, found: SavedCheckpoint, to: str, out: Path, options: ExportOptions, own: Job | None,
    trust_module: bool,
) -> int:  # fmt: skip
    """Export a checkpoint as a folder; returns the bytes of the weights."""
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
            raise without_average(found)
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

    if export := implementation_of(model.family).export:
        size: int = find_object(export, "model.implementation")(
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
