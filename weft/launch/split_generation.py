"""Text of a model that tensor parallelism splits over several processes; each reads its own part of the weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from weft.checkpoint.reader import Index
from weft.data.sources import open_tokenizer
from weft.job.cluster import Cluster
from weft.job.errors import JobError
from weft.job.parallel import Parallel
from weft.job.schema import Job
from weft.job.train import Train
from weft.mesh import connect
from weft.models.build_model import build_model
from weft.parallel.apply import parallelize
from weft.parallel.spread_model import SpreadModel
from weft.planner.make_plan import make_plan
from weft.training.generate import Sampling, continue_texts, end_tokens


def split_job(job: Job, tp: int) -> Job:
    """The model and data of a job on CPU ranks of tensor parallelism; each token is computed by all of them."""
    if not job.model.continues_text or job.model.module:
        raise JobError(f"--tp splits a language model of Weft; this run trains {job.model.module or job.model.family}")
    return Job(
        model=job.model, data=job.data, precision="fp32", train=Train(global_batch=1, compile=False),
        cluster=Cluster(device="cpu", devices_per_node=tp), parallel=Parallel(tp=tp, dp_shard=1, sequence=False),
    )  # fmt: skip


def continue_on_ranks(
    folder: str, job: Job, checkpoint: str, prompts: Sequence[str], tokens: int, sampling: Sampling, ema: bool, out: str
) -> None:
    """Runs on each rank: rank 0 writes the texts to `out` in parts, one JSON list [prompt, text] a line. Relative paths
    start at `folder`."""
    with contextlib.chdir(folder):
        _continue(job, checkpoint, prompts, tokens, sampling, ema, out)


def _continue(
    job: Job, checkpoint: str, prompts: Sequence[str], tokens: int, sampling: Sampling, ema: bool, out: str
) -> None:
    job, plan = make_plan(job)
    mesh = connect(plan, job.comm.timeout_s)
    model = parallelize(build_model(job.model, job.train.seed), mesh, plan, job.train.seed)
    assert isinstance(model, SpreadModel)
    index = Index(Path(checkpoint))
    named = {f"model.{name}": t for name, t in (model.master_params | model.frozen).items()}
    if ema:
        averages = {name: f"ema.{name.removeprefix('model.')}" for name in named}
        named = {averages[n] if averages[n] in index.tensors else n: t for n, t in named.items()}
    saved = named | {f"buffer.{name}": t for name, t in model.buffers().items()}
    if text := index.mismatch(saved):
        raise JobError(text)
    with torch.no_grad():
        index.fill(saved)
    model.refresh()
    pieces = continue_texts(
        model.module.eval(), open_tokenizer(job.data), prompts, tokens, sampling,
        window=job.model.max_len or job.data.seq_len, end_tokens=end_tokens(job.model.pretrained),
    )  # fmt: skip
    with open(out if mesh.rank == 0 else "/dev/null", "w", encoding="utf-8") as file:
        write = partial(print, file=file, flush=True)
        for piece in pieces:
            write(json.dumps(piece))
    mesh.close()
