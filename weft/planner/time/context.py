"""Context parallelism: how the sequence is split over cp, and the traffic of each style.

parallel/context uses the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.job.schema import Model
from weft.planner.plan import Plan


def chunks_of(group: int, ring: int, halves: int) -> list[int]:
    """The chunks of the sequence that a group of the ring holds: one, or one from the front and one from the end."""
    return [group] if halves == 1 else [group, 2 * ring - 1 - group]


def sees(i: int, j: int, causal: bool, size: int = 1, window: int | None = None) -> bool:
    """Whether queries of chunk i see keys of chunk j, of `size` tokens each."""
    near = window is None or (i - j - 1) * size + 1 < window
    return (j <= i or not causal) and near


def chunk_size(length: int, chunks: int, unit: int) -> int:
    """Tokens of a chunk, a multiple of `unit`; the sequence is padded so that all chunks have as many."""
    return -(-length // (chunks * unit)) * unit


def ring_chunks(plan: Plan, group: int, causal: bool, size: int, window: int | None) -> tuple[int, int]:
    """Chunks of keys that a group sends to others in a forward pass, and those that it receives."""
    ring, _ = plan.rings
    held = [chunks_of(g, ring, 2 if plan.zigzag else 1) for g in range(ring)]

    def wanted(by: int, of: int) -> int:
        return sum(any(sees(i, j, causal, size, window) for i in held[by]) for j in held[of]) if by != of else 0

    return sum(wanted(g, group) for g in range(ring)), sum(wanted(group, g) for g in range(ring))


def rings(style: str, cp: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Groups in the ring, and ranks in each group: their product is cp."""
    if style == "ring":
        return cp, 1
    if style == "ulysses":
        return 1, cp
    inside = [u for u in range(2, cp) if cp % u == 0 and ulysses_fits(u, heads, kv_heads)]
    return (cp // max(inside), max(inside)) if inside else (cp, 1)


def ulysses_fits(ranks: int, heads: int, kv_heads: int) -> bool:
    """Whether heads divide evenly over so many ranks, with the key and value heads they read."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


RING_HOP_KV = 1.5
"""Keys and values received in a hop of a balanced causal ring, in units of a rank's tokens: 3 of 4 chunks, of each."""
ATTENTION_EFFICIENCY = 0.4
"""Share of the device's peak that attention reaches, where not measured."""


def choose_style(
    cp: int, in_node: int, heads: int, kv_heads: int, tokens: float, width: int, flops: float, bytes_s: float,
    at_once: bool = False,
) -> tuple[str, int, str]:  # fmt: skip
    """A style, the ranks of its groups, and the reason. `tokens` are a rank's own, `bytes_s` the slowest link's.
    `at_once`: keys are not sent hop by hop, so that no computing hides it."""
    # a hop computes 2 · tokens² · heads · head_dim and receives 1.5 · tokens · kv_heads · head_dim values
    shortest = RING_HOP_KV * width * kv_heads / (2 * heads) * ATTENTION_EFFICIENCY * flops / bytes_s
    if tokens >= shortest and not at_once:
        return "ring", 1, f"a rank's {tokens:.0f} tokens compute longer than {shortest:.0f} tokens' keys travel"
    if cp <= in_node and ulysses_fits(cp, heads, kv_heads):
        if at_once:
            return "ulysses", cp, "heads are exchanged for fewer bytes than all keys"
        return "ulysses", cp, f"{tokens:.0f} tokens a rank are too few to hide a ring's messages ({shortest:.0f} would)"
    inside = [u for u in range(2, cp) if cp % u == 0 and u <= in_node and ulysses_fits(u, heads, kv_heads)]
    if inside:
        u = max(inside)
        return "hybrid", u, f"Ulysses among the {u} ranks whose heads and links allow it, a ring between"
    return "ring", 1, f"{heads} heads and {kv_heads} key heads cannot be dealt out to {cp} ranks"


def attentions(model: Model, first: int, end: int) -> int:
    """Attentions in blocks `first` up to but not including `end`: a block of a decoder with an encoder has two."""
    own = end - first
    return own + (end - max(first, min(end, model.encoder_layers or 0)) if model.has_source else 0)


Spans = Sequence[tuple[int, int, int]]
"""Blocks of a rank: the first, the end, and the end of those that are recomputed, which are the first."""


def context_bytes(
    model: Model, plan: Plan, sequences: int, length: int, compute: int, group: int, spans: Spans, whole: bool = False
) -> dict[str, float]:
    """Bytes one rank sends and receives along cp in a step, by collective, for `sequences` of `length` tokens; with
    `whole`, an all-to-all's with what a rank keeps of its own. The ring's depend on the group: the chunk at the end is
    needed by the groups before alone.
    """
    ring, ulysses = plan.rings
    chunks, unit = ring * (2 if plan.zigzag else 1), ulysses * (plan.tp if plan.sequence else 1)
    size = chunk_size(length, chunks, unit)
    tokens = sequences * size * chunks
    d = model.head_dim or 0
    heads, kv = (model.heads or 0) // plan.tp, max(1, (model.kv_heads or 0) // plan.tp)
    held = max(kv, ulysses)  # copies of key heads where there are fewer than ranks
    out: dict[str, float] = {}
    if ring > 1 and not model.has_source:
        chunk = 2 * sequences * size * (held // ulysses) * d * compute
        out = {"send": 0.0, "recv": 0.0}
        for limited in (False, True):
            count, forward = _passes(model, plan, spans, limited)
            window = model.window if limited else None
            sent, received = ring_chunks(plan, group, bool(model.causal), size, window)
            # keys are sent once more in the backward pass, and their gradients come back
            out["send"] += chunk * (forward * sent + count * (sent + received))
            out["recv"] += chunk * (forward * received + count * (received + sent))
    count, forward = _passes(model, plan, spans)
    if ulysses > 1:
        row = tokens / plan.cp * d * compute * (1 if whole else (ulysses - 1) / ulysses)
        extra = count * 2 * (heads + held) if plan.long else 0  # q, k, v and the output once more
        out["all_to_all"] = row * ((forward + count) * 2 * (heads + held) + extra)
    if ring > 1 and model.has_source:  # keys and values go to all groups, and their gradients come back
        keys = tokens * 2 * (held // ulysses) * d * compute * (1 if whole else (ring - 1) / ring)
        out["all_to_all"] = out.get("all_to_all", 0.0) + keys * (forward + count)
    return out


def _passes(model: Model, plan: Plan, spans: Spans, limited: bool | None = None) -> tuple[int, int]:
    """Attentions and their forward passes in a step, of all blocks or only of those with or without a window."""

    def count(first: int, end: int) -> int:
        if limited is None:
            return attentions(model, first, end)
        return sum(model.has_window(i) == limited for i in range(first, end))

    own = sum(count(first, end) for first, end, _ in spans)
    again = 0 if plan.long else sum(count(first, some) for first, _, some in spans)  # chunked blocks keep the output
    return own, own + again
