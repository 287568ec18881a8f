"""`weft import`: a published checkpoint as a run whose first checkpoint holds its weights."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from weft.checkpoint.contents import Chunk
from weft.checkpoint.format import WEIGHTS_ONLY, Manifest
from weft.checkpoint.writer import SaveFailed, write_checkpoint
from weft.comm.agreement import Agreement
from weft.extensions.pretrained.checkpoint_folder import CONFIG, SIDE_FILES, SIDE_FOLDER, TOKENIZER, find_folder
from weft.extensions.pretrained.interchange.foreign_weights import ForeignWeights, described_model
from weft.extensions.pretrained.interchange.tensor_files import TensorFiles, open_tensor_files
from weft.extensions.pretrained.llama2c_tokenizer import converted_tokenizer
from weft.extensions.pretrained.published_weights import PublishedWeights, open_published
from weft.extensions.pretrained.tensor_dtypes import write_dtypes
from weft.job.errors import JobError, MachineError
from weft.job.files.checked_files import MAX_JSON_BYTES, checked_file
from weft.job.files.run_folder import RunDir
from weft.job.files.run_name import as_run_name
from weft.job.load import parse_job
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.launch.run_files import write_job_and_plan
from weft.planner import Plan, make_plan
from weft.precision import LossScale

DEFAULT_SEQ_LEN = 1024


class _Parameters(Sequence[Tensor]):
    """Parameters that are read from their files when they are asked for, one at a time."""

    def __init__(self, weights: PublishedWeights | ForeignWeights):
        self.weights, self.names = weights, list(weights.shapes)
        self.dtypes = weights.dtypes()

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        name = self.names[index]
        return self.weights.load(name, self.dtypes[name])

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))


class _ImportedContents:
    """The contents of a checkpoint that is written from a published one, parameter by parameter."""

    def __init__(self, weights: PublishedWeights | ForeignWeights):
        self.tensors = _Parameters(weights)

    def plan(self) -> list[tuple[Any, ...]]:
        shapes, dtypes, buffers = self.tensors.weights.shapes, self.tensors.dtypes, self.tensors.weights.buffers
        chunks = [
            Chunk(
                f"{'buffer' if n in buffers else 'model'}.{n}",
                str(dtypes[n]).removeprefix("torch."),
                shape,
                (0,) * len(shape),
                shape,
            )
            for n, shape in shapes.items()
        ]
        return [astuple(chunk) for chunk in chunks]


def import_run(
    source: str, name: str | None = None, runs_dir: str = "runs", like: Job | None = None
) -> tuple[RunDir, Job, int]:
    """Write a checkpoint as the run runs_dir/name; returns it, its job and the bytes of its checkpoint. `like` has the
    model of a folder that does not describe it.

    At most one file of weights is open at a time, and one parameter in memory.
    """
    foreign = open_tensor_files(Path(source).expanduser())
    folder = Path(source).expanduser() if foreign else find_folder(source)
    name = name or as_run_name(Path(source.rstrip("/")).name) or "imported"
    run = RunDir(Path(runs_dir) / name)
    side = run.path / SIDE_FOLDER
    weights: PublishedWeights | ForeignWeights
    if foreign is None:
        weights, fields = _open(folder, name, runs_dir)
    else:
        weights, fields = _open_foreign(folder, foreign, name, runs_dir, like)
    try:
        run.path.mkdir(parents=True)
    except FileExistsError:
        raise JobError(f"{run.path} exists; give the imported run another --name") from None
    try:
        _copy_side_files(folder, side)
        write_dtypes(side, weights.file_dtypes())
        if not (side / TOKENIZER).is_file() and (made := converted_tokenizer(folder)) is not None:
            shutil.copyfile(made, side / TOKENIZER)
        if (side / CONFIG).is_file():
            fields["model"]["pretrained"] = str(side)
        if (side / TOKENIZER).is_file():
            fields["data"]["tokenizer"] = str(side / TOKENIZER)
        job, plan = make_plan(parse_job(fields), 1)
        manifest = Manifest(0, _meta(job, plan), {})
        saved = write_checkpoint(_ImportedContents(weights), run.checkpoints, manifest, Agreement(None))
        write_job_and_plan(run, job, plan)
    except BaseException as error:
        _undo(run)
        if isinstance(error, SaveFailed):
            raise MachineError(f"{run.path} could not be written: {error}") from error
        raise
    return run, job, saved.bytes


def _undo(run: RunDir) -> None:
    """Remove what an import has written into the folder that it created."""
    for made in (run.path / SIDE_FOLDER, run.checkpoints):
        shutil.rmtree(made, ignore_errors=True)
    for file in (run.job, run.plan):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds files of others
        run.path.rmdir()


def _open(folder: Path, name: str, runs_dir: str) -> tuple[PublishedWeights, dict[str, Any]]:
    """The weights of a checkpoint, checked, and the fields of the job that trains it further."""
    raw: dict[str, Any] = {"name": name, "runs_dir": runs_dir, "model": {"pretrained": str(folder)}}
    job = resolve(parse_job({**raw, "data": {"source": "synthetic", "seq_len": 1}}))
    length = min(DEFAULT_SEQ_LEN, job.model.max_len or DEFAULT_SEQ_LEN)
    model = job.model.model_dump(mode="json", exclude_none=True)
    return open_published(str(folder), job.model), {**raw, "model": model, "data": {"seq_len": length}}


def _open_foreign(
    folder: Path, files: TensorFiles, name: str, runs_dir: str, like: Job | None
) -> tuple[ForeignWeights, dict[str, Any]]:
    """The weights of a folder of another library, checked, and the fields of the job that trains them further."""
    raw: dict[str, Any] = {"name": name, "runs_dir": runs_dir}
    model = (
        described_model(folder) if like is None else like.model.model_dump(exclude_none=True, exclude={"pretrained"})
    )
    if model is None:
        raise JobError(f"{folder} does not describe its model; give a job that does with --job")
    job = resolve(parse_job({**raw, "model": model, "data": {"source": "synthetic", "seq_len": 1}}))
    if job.model.module or job.model.lora:
        raise JobError("--job must describe one of Weft's own models without adapters")
    length = min(DEFAULT_SEQ_LEN, job.model.max_len or DEFAULT_SEQ_LEN)
    fields = {**raw, "model": job.model.model_dump(mode="json", exclude_none=True), "data": {"seq_len": length}}
    return ForeignWeights(folder, files, job.model), fields


def _copy_side_files(folder: Path, side: Path) -> None:
    side.mkdir(parents=True)
    for name in SIDE_FILES:
        if checked_file(folder / name, most=MAX_JSON_BYTES):
            shutil.copyfile(folder / name, side / name)


def _meta(job: Job, plan: Plan) -> dict[str, Any]:
    """The metadata of a checkpoint at step 0 without optimizer state."""
    counts = {"step": 0, "tokens": 0, "samples": 0, "scale": LossScale.for_precision(plan.precision).state()}
    return {**counts, WEIGHTS_ONLY: True, "job": job.model_dump(mode="json"), "plan": plan.to_json()}
