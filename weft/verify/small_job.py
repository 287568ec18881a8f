"""A small job of the same kind, for proofs of models that a laptop cannot hold."""

from __future__ import annotations

from math import gcd
from typing import Any

from weft.data.sources import is_user_dataset, open_tokenizer
from weft.job.errors import JobError
from weft.job.schema import Experts, Job
from weft.job.shapes import resolve


def small(job: Job) -> Job:
    """The same kind of model, small enough for any laptop: fewer layers, narrower, shorter, same head ratio."""
    m = job.model
    if m.module:
        raise JobError("a model of your own cannot be shrunk; give it smaller model.args instead")
    m = resolve(job).model
    updates: dict[str, Any] = {"shape": None, "layers": min(m.layers or 2, 3), "dim": min(m.dim or 64, 64)}
    if not m.takes_vectors:
        group = (m.heads or 4) // (m.kv_heads or 4)
        heads = max(4, 4 * group if group <= 2 else 2 * group)
        heads = min(heads, m.heads or heads)
        updates |= {
            "heads": heads, "kv_heads": max(1, heads // group), "head_dim": 16, "ffn": min(m.ffn or 128, 128),
            "vocab": min(m.vocab or 256, _data_vocab(job) + m.hides_tokens),
        }  # fmt: skip
        if m.has_source:
            updates |= {"layers": 4, "encoder_layers": 2, "head_scale": None if m.head_scale is None else m.head_scale}
        if m.rope_dim is not None:
            updates["rope_dim"] = 8
        if m.rope_scaling is not None and m.rope_scaling.kind == "longrope":
            updates["rope_scaling"] = None  # its factors are those of wider heads
        if m.latent is not None:
            rank = None if m.latent.q_rank is None else min(m.latent.q_rank, 32)
            small_latent = {"q_rank": rank, "kv_rank": min(m.latent.kv_rank, 32), "v_dim": 16}
            updates |= {"kv_heads": heads, "latent": m.latent.model_copy(update=small_latent)}
        seq = min(job.data.seq_len, 64)
        updates["max_len"] = seq
        job = job.model_copy(update={"data": job.data.model_copy(update={"seq_len": seq})})
    if m.experts is not None:
        updates["experts"] = _fewer(m.experts)
    batch = {"global_batch": min(job.train.global_batch, 16), "batch_ramp": [], "microbatch": "auto"}
    train = job.train.model_copy(update={**batch, "accumulation": "auto"})
    return job.model_copy(update={"model": m.model_copy(update=updates), "train": train})


def _data_vocab(job: Job) -> int:
    """Tokens that the data may have, or 512 of synthetic ones; those of a dataset of one's own are not known."""
    if job.data.source == "synthetic":
        return 512
    if is_user_dataset(job.data.source):
        return job.model.vocab or 256
    try:
        return open_tokenizer(job.data).vocab
    except JobError:  # not tokens, such as images
        return 256


def _fewer(e: Experts) -> Experts:
    """Up to 8 experts in groups of at least two, of which a token may use about the same share."""
    count, top_k = min(e.count, 8), min(e.top_k, 2)
    groups = gcd(e.groups, max(1, count // 2))
    top_groups = None if e.top_groups is None else -(-e.top_groups * groups // e.groups)
    if top_groups is not None:  # the allowed groups must have top_k experts
        top_groups = max(top_groups, -(-top_k * groups // count))
    less = {"count": count, "top_k": top_k, "ffn": min(e.ffn or 32, 32), "groups": groups, "top_groups": top_groups}
    return e.model_copy(update={**less, "first_dense": min(e.first_dense, 1)})
