"""Epochs: how many samples one reads, and the steps of train.epochs."""

from __future__ import annotations

import math

from weft.data.dataset import Dataset
from weft.data.open_dataset import open_dataset
from weft.job.errors import JobError, WeftError
from weft.job.schema import Job
from weft.job.shapes import resolve


def epoch_len(dataset: Dataset, global_batch: int, drop_last: bool) -> int:
    """Samples read in an epoch: all, or with drop_last those of whole batches."""
    if not drop_last:
        return dataset.train_len
    if dataset.train_len < global_batch:
        raise JobError(
            f"data.drop_last=true drops every sample: an epoch has {dataset.train_len}, and train.global_batch is "
            f"{global_batch}; write a smaller batch, or leave drop_last out"
        )
    return dataset.train_len // global_batch * global_batch


def with_steps(job: Job) -> Job:
    """The job with train.steps computed from train.epochs, which needs the length of its data."""
    train = job.train
    if train.epochs is None:
        return job
    length = epoch_len(open_dataset(resolve(job)), train.global_batch, job.data.drop_last)
    samples = math.ceil(train.epochs * length - 1e-6)
    steps = train.ramp.steps_of(samples)
    if "steps" in train.model_fields_set and train.steps != steps:
        raise JobError(
            f"train.epochs={train.epochs:g} of {length} samples is {steps} steps, and train.steps={train.steps} is set "
            f"too; leave one of them out, or write train.steps={steps}"
        )
    return job.model_copy(update={"train": train.model_copy(update={"steps": steps})})


def with_known_steps(job: Job) -> Job:
    """The same where the data can be read here; a plan is made without them otherwise."""
    try:
        return with_steps(job)
    except WeftError:
        if "steps" in job.train.model_fields_set:
            raise
        return job
