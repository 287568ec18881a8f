"""Memory of a whole model of compiled blocks on a GPU: what torch.compile keeps, and where in a step the peak stands.

The counts were read off an H200 (bench/gpu_memory.py): the compiler keeps the inputs of every product and what
attention asks for, and computes the rest of a block again inside the fused kernels of the backward pass.
"""

from __future__ import annotations

from weft.job.schema import Job, Model
from weft.planner.engine_constants import FP8_LOGITS_CHUNKS, LOGITS_BYTES
from weft.planner.memory.rank_bytes import compute_bytes, states_of
from weft.planner.memory.recompute import recomputed_share, selective_elements
from weft.planner.plan import Plan

GIB = 2**30
WORKSPACE = 0.3 * GIB
"""Scratch of cuBLAS and cuDNN."""


def compiled_memory(job: Job, plan: Plan) -> dict[str, float]:
    """GiB by part of one rank: at the loss, when every block's activations are kept, or while a block goes back."""
    model, wide = job.model, compute_bytes(plan)
    states = states_of(job, plan, 0)
    assert states is not None
    tokens = plan.microbatch * job.data.seq_len
    layers = model.layers or 0
    lasting = states.parameters + states.copies + states.optimizer + states.average
    summed = states.gradients if plan.accumulation > 1 or plan.dp_replicate > 1 else 0
    block = block_bytes(model, plan, wide) * tokens
    kept = kept_bytes(model, plan, wide) * tokens * layers
    stream = 3 * (model.dim or 0) * wide * tokens
    loss = stream + loss_bytes(model, plan, wide, tokens)
    again = recomputed_share(plan.recompute, model) > 0
    back = 2 * (model.ffn or 0) * wide * tokens + stream + (block if again else 0)
    embedding = (model.vocab or 0) * (model.dim or 0) * wide
    first = kept + summed + embedding + back
    last = states.gradients + back + kept / max(1, layers)
    working = max(kept + summed + loss, first, last) + WORKSPACE
    return {
        "states_gib": (lasting + min(states.gradients, working)) / GIB,
        "gathered_gib": 0.0,
        "activations_gib": max(0.0, working - states.gradients) / GIB,
    }


def block_bytes(model: Model, plan: Plan, wide: int) -> float:
    """A token's share of what one compiled block keeps: x and its norm, twice; q, k, v and the output; the hidden.

    In fp8 norms and activations are made again where they are cast again; with delayed scales they were cast for good.
    """
    heads, kv = ((n or 0) * (model.head_dim or 0) for n in (model.heads, model.kv_heads))
    again = plan.precision == "fp8" and plan.fp8.get("amax") == "dynamic"
    hidden = ((3 if model.activation == "swiglu" else 2) - again) * (model.ffn or 0)
    return wide * ((4 - 2 * again) * (model.dim or 0) + 2 * heads + 2 * kv + hidden) + 4 * (model.heads or 0) + 8


def kept_bytes(model: Model, plan: Plan, wide: int) -> float:
    """A token's share of what a block keeps on average under the plan's recompute."""
    whole, least = block_bytes(model, plan, wide), wide * (model.dim or 0)
    if plan.recompute == "selective":
        return wide * selective_elements(model)
    share = recomputed_share(plan.recompute, model)
    return share * least + (1 - share) * whole


def loss_bytes(model: Model, plan: Plan, wide: int, tokens: float) -> float:
    """A chunk of logits, which become their own gradient, and the head's gradient, in fp32 where chunks add to it.

    A head in fp8 has the weight both ways round in fp8, a chunk's gradient, and that of several chunks transposed; the
    weight's gradient comes when the logits are gone.
    """
    logits = tokens * (model.vocab or 0) * wide
    head = (model.vocab or 0) * (model.dim or 0)
    chunks = max(1, -(-logits // LOGITS_BYTES["cuda"]))
    if not plan.fp8.get("head"):
        return logits / chunks + head * (wide + 4 * (chunks > 1))
    held = min(logits / wide, FP8_LOGITS_CHUNKS * LOGITS_BYTES["cuda"])
    return logits / chunks * (1 + 1 / wide) + held + head * (2 + 4 * (held < logits / wide))
