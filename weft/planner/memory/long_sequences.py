"""Sequences that are long for a device: tokens that pass through a block at once, and host memory for its input."""

from __future__ import annotations

from functools import cache

import numpy as np

from weft.hardware.probe import probe
from weft.job.schema import Job
from weft.planner.engine_constants import LONG_SEQUENCE_CHUNK
from weft.planner.memory.layout_ranks import SPLITS
from weft.planner.model.model_facts import Size
from weft.planner.rules.context_rules import attends
from weft.planner.search.candidates import Layouts
from weft.planner.search.space import MAX_MICROBATCH_TOKENS

HOST_SHARE = 0.7
"""Share of a host's memory for offloaded states and activations."""


def chunk_tokens(job: Job, layouts: Layouts) -> Size:
    """Tokens of a sequence that pass through a block's linear layers at once; 0: all of them.

    Chunks recompute, so auto takes none where the job sets a recompute of less.
    """
    if job.memory.chunk != "auto":
        return np.full(len(layouts), job.memory.chunk)
    if job.memory.recompute not in ("auto", "full"):
        return np.zeros(len(layouts), np.int64)
    long = job.data.seq_len / layouts.cp > MAX_MICROBATCH_TOKENS
    if not attends(job) or job.model.first_blocks is not None:
        return np.zeros(len(layouts), np.int64)
    return np.where(long & ~(SPLITS[layouts.schedule] & (layouts.pp > 1)), LONG_SEQUENCE_CHUNK, 0)


def host_gib(job: Job, layouts: Layouts) -> Size:
    """Host memory of a rank for offloaded activations."""
    if job.memory.host_gib is not None:
        return np.full(len(layouts), job.memory.host_gib)
    return HOST_SHARE * _host_memory_gib() * job.cluster.nodes / layouts.world


@cache
def _host_memory_gib() -> float:
    return probe().memory_gib
