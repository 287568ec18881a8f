"""What a run says about its data before the first step: an evaluation without samples, a batch larger than the data,
and sequences longer than a published model was trained on."""

from __future__ import annotations

from collections.abc import Iterator

from weft.data.dataset import Dataset
from weft.data.sources import is_user_dataset
from weft.job.interchange import read_published
from weft.job.schema import Job


def data_warnings(job: Job, dataset: Dataset) -> Iterator[str]:
    """A sentence for each setting that the data or the model's positions make pointless."""
    source, train = job.data.source, job.train
    if train.eval_every and not dataset.val_len:
        part = "give it val_len and val(index)" if is_user_dataset(source) else "write data.val_fraction=0.1"
        yield (
            f"data.source {source} has no validation part, so train.eval_every={train.eval_every} evaluates nothing; "
            f"{part}, or train.eval_every=0"
        )
    if 0 < dataset.train_len < train.global_batch and not job.data.growing:
        yield (
            f"data.source {source} has {dataset.train_len} training samples, fewer than train.global_batch="
            f"{train.global_batch}, so a batch holds some of them more than once; train.global_batch="
            f"{dataset.train_len} would not"
        )
    rotary = job.model.pretrained if job.model.positions == "rope" else None
    longest = read_published(rotary, "positions") if rotary else None
    if longest is not None and job.data.seq_len > longest:
        yield (
            f"data.seq_len={job.data.seq_len} is longer than the {longest} positions that {job.model.pretrained} was "
            f"trained with; data.seq_len={longest} would fit, or set model.rope_scaling"
        )
