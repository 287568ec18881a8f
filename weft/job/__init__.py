"""The typed description of a run: what to train, on what, with which recipe."""

from weft.job.errors import JobError, WeftError
from weft.job.load import apply_overrides, dump_yaml, find_job, load_job, parse_job, recipes
from weft.job.schema import Data, Job, Model, Optim, Parallel, Train

__all__ = [
    "Data", "Job", "JobError", "Model", "Optim", "Parallel", "Train", "WeftError", "apply_overrides", "dump_yaml",
    "find_job", "load_job", "parse_job", "recipes",
]  # fmt: skip
