"""The typed description of a run: what to train, on what, with which recipe."""

from weft.job.errors import JobError, WeftError
from weft.job.load import apply_overrides, dump_yaml, find_job, load_job, parse_job, recipes
from weft.job.schema import (
    Checkpoint,
    Cluster,
    Comm,
    Data,
    Job,
    Memory,
    Model,
    Optim,
    Parallel,
    RopeScaling,
    Train,
    Watch,
)

__all__ = [
    "Checkpoint",
    "Cluster",
    "Comm",
    "Data",
    "Job",
    "JobError",
    "Memory",
    "Model",
    "Optim",
    "Parallel",
    "RopeScaling",
    "Train",
    "Watch",
    "WeftError",
    "apply_overrides",
    "dump_yaml",
    "find_job",
    "load_job",
    "parse_job",
    "recipes",
]
