"""Attention over cp ranks equals full attention, forward and backward; bytes and activations match the plan."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers import on_ranks
from helpers.parity import make_job
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.shards import local_of
from weft.data.loader import to_device
from weft.launch.rank_pool import RankPool
from weft.mesh import connect
from weft.models.attention import TokenInfo
from weft.models.attention_kernels import REFERENCE, KeyLimits, attend, attend_backward, merge
from weft.models.attention_layer import _attention
from weft.models.documents import Docs
from weft.parallel.context.context_attention import Context
from weft.parallel.context.sequence_split import SequenceSplit
from weft.planner import make_plan
from weft.planner.plan import Plan
from weft.planner.rules.layout_syntax import parse_layout, ranks
from weft.planner.time.context import choose_style, context_bytes
from weft.verify.prove import with_layout

Case = dict[str, Any]
BASE: Case = {"group": 1, "causal": True, "length": 16, "heads": 4, "kv": 4, "docs": None, "window": None,
              "sinks": False, "dtype": torch.float32}  # fmt: skip
PACKED = [0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4]
CASES: list[Case] = [
    {**BASE, **changes}
    for changes in (
        {}, {"causal": False}, {"kv": 2}, {"kv": 1, "length": 13}, {"causal": False, "length": 9, "kv": 2},
        {"docs": PACKED, "length": 18}, {"docs": PACKED, "length": 18, "causal": False}, {"length": 3},
        {"dtype": torch.bfloat16, "kv": 2, "length": 40}, {"window": 1, "length": 21}, {"window": 3, "kv": 2},
        {"window": 11, "length": 37}, {"window": 5, "docs": PACKED, "length": 18}, {"sinks": True, "length": 13},
        {"window": 7, "sinks": True, "length": 37, "kv": 2}, {"window": 4, "sinks": True, "docs": PACKED, "length": 18},
    )
]  # fmt: skip


def plan_of(world: int, case: Case) -> Plan:
    group = world if case["group"] == 0 else case["group"]
    return Plan("cpu", "cpu", "gloo", cp=world, cp_group=group, zigzag=case["causal"] and world > group)


def draw(case: Case) -> tuple[list[Tensor], Tensor | None]:
    random = torch.Generator().manual_seed(1)
    heads = (case["heads"], case["kv"], case["kv"], case["heads"])
    full = [torch.randn((2, case["length"], n, 8), generator=random).to(case["dtype"]) for n in heads]
    docs = None if case["docs"] is None else torch.tensor([case["docs"], sorted(case["docs"], key=lambda d: d // 3)])
    return full, docs


def compare(cases: list[Case]) -> list[dict[str, Any]]:
    """On one rank: how far its part of each case is from full attention, and what it sent."""
    out = []
    mesh = connect(plan_of(int(os.environ["WORLD_SIZE"]), BASE))
    axis = mesh.axis("cp")
    assert axis is not None
    for case in cases:
        (q, k, v, dout), docs = draw(case)
        length = case["length"]
        sinks = torch.linspace(-1, 1, case["heads"]).requires_grad_() if case["sinks"] else None
        full = [*(t.float().requires_grad_() for t in (q, k, v)), *([] if sinks is None else [sinks])]
        info = TokenInfo(None, docs, None, torch.arange(length), length, window=case["window"], sinks=sinks)
        y = _attention(*full[:3], case["causal"], info)
        right = [y.detach(), *torch.autograd.grad(y, full, dout.float())]
        cut = SequenceSplit.of(plan_of(axis.size, case), axis.rank)
        rows = cut.rows(length)
        inside = rows < length
        axis.bytes.clear()
        context = Context(axis, cut)
        mine = [t[:, rows.clamp(max=length - 1)].requires_grad_() for t in (q, k, v)]
        info = info._replace(rows=rows)
        made = context(*mine, case["causal"], info)
        upstream = dout[:, rows.clamp(max=length - 1)] * inside.view(1, -1, 1, 1)
        grads = torch.autograd.grad(made, [*mine, *full[3:]], upstream)
        sent = dict(axis.bytes)
        with torch.no_grad():
            by_hand, kept = context.forward(*mine, case["causal"], info)
            again, of_sinks = context.backward(upstream, *mine, kept, case["causal"], info)
        off = max(
            float((a.float()[:, inside] - b[:, rows[inside]]).abs().max()) if inside.any() else 0.0
            for a, b in zip([made.detach(), *grads[:3], by_hand, *again], [*right[:4], *right[:4]], strict=True)
        )
        if of_sinks is not None:  # the sum over all ranks
            off = max(off, *(float((axis.all_reduce(g) - right[4]).abs().max()) for g in (grads[3], of_sinks)))
        out.append({"off": off, "sent": sent, "padding": float(sum(g[:, ~inside].abs().sum() for g in grads[:3]))})
    return out


@pytest.mark.parametrize(("world", "group"), [(2, 1), (4, 1), (2, 2), (4, 4), (4, 2)])
def test_every_case_equals_full_attention(pool: RankPool, world: int, group: int) -> None:
    cases = [{**case, "group": group} for case in CASES]
    for rank, seen in enumerate(pool.run(compare, world, cases)):
        for case, found in zip(cases, seen, strict=True):
            tolerance = 1e-5 if case["dtype"] == torch.float32 else 6e-2
            assert found["off"] < tolerance, (rank, case)
            assert found["padding"] == 0, (rank, case)


def test_fully_masked_chunks_are_not_sent(pool: RankPool) -> None:
    """Documents that end with a chunk need no keys of other ranks; causal chunks are sent to later ones only."""
    apart = {**BASE, "docs": [i // 2 for i in range(16)], "length": 16}
    bidirectional = {**BASE, "causal": False}
    seen = pool.run(compare, 4, [apart, BASE, bidirectional])
    one = 2 * 2 * 2 * 4 * 8 * 4  # keys and values of 2 samples, 2 tokens, 4 heads of 8, in fp32
    for rank, (packed, causal, both) in enumerate(seen):
        assert packed["off"] < 1e-5
        assert "send" not in packed["sent"]
        assert causal["sent"]["send"] == one * (3 + rank + 9)
        assert both["sent"]["send"] == 2 * one * (3 + 6)


def step_bytes(job: Any) -> dict[str, Any]:
    """On one rank: what a step sent along cp, the plan's formula, and how much the forward pass kept."""
    job, plan, mesh, stepper, loader = on_ranks.begin(job)
    axis = mesh.axis("cp")
    batches = next(iter(loader))
    kept: dict[int, int] = {}
    weights = {local_of(p.detach()).untyped_storage().data_ptr() for p in stepper.state.model.module.parameters()}

    def pack(t: Tensor) -> Tensor:
        if isinstance(t, DTensor):
            return t
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = stepper.loss_of(0.0)(stepper.state.model.module, stepper.local(batches)[0])
    memory = sum(kept.values())
    del loss
    if axis is None:
        return {"memory": memory, "sent": {}, "formula": {}}
    axis.bytes.clear()
    stepper.gradients([to_device(b, mesh.device) for b in batches])
    layers = job.model.layers
    spans = [(0, layers, plan.recomputed(0, layers, layers))]
    formula = context_bytes(
        job.model, plan, job.train.global_batch, job.data.seq_len, 4, axis.rank // plan.cp_group, spans
    )
    formula.pop("recv", 0)  # counted where it is sent
    return {"memory": memory, "sent": {k: axis.bytes[k] for k in formula}, "formula": formula}


SECTIONS: dict[str, Any] = {
    "model": {"kv_heads": 2, "vocab": 16}, "data": {"seq_len": 256}, "train": {"global_batch": 2},
}  # fmt: skip
PLAIN: dict[str, Any] = {}
STEPS: dict[str, tuple[dict[str, Any], ...]] = {
    "cp 2 ring": (PLAIN, {"recompute": "full"}, {"recompute": 1}, {"chunk": 40}),
    "cp 4 ring": (PLAIN,),
    "cp 2 ulysses": (PLAIN, {"recompute": "full"}, {"chunk": 40}),
    "cp 4 ulysses": (PLAIN,),
    "cp 4 hybrid": (PLAIN, {"recompute": "full"}),
    "cp 2 × tp 2": (PLAIN, {"chunk": 40}),
}
"""Layouts with sections of memory."""


def test_bytes_and_activations_match_the_plan(pool: RankPool) -> None:
    one = with_layout(make_job(**SECTIONS), {"dp_replicate": 1, "dp_shard": 1})
    alone = pool.run(step_bytes, 1, make_plan(one))[0]["memory"]
    for layout, memories in STEPS.items():
        section = parse_layout(layout)
        for memory in memories:
            spread = make_plan(with_layout(make_job(**{**SECTIONS, "memory": memory}), section))
            for seen in pool.run(step_bytes, ranks(section), spread):
                assert seen["sent"] == seen["formula"], (layout, memory)
                if not memory and layout.endswith("ring"):
                    assert seen["memory"] / alone == pytest.approx(1 / section["cp"], rel=0.05)


def test_bytes_with_windows(pool: RankPool) -> None:
    """Chunks that no window reaches are not sent: with one shorter than a chunk, only to the next."""
    model = {**SECTIONS["model"], "window": 20, "window_layers": [0], "sinks": True}
    for layout, memory in (("cp 4 ring", PLAIN), ("cp 4 hybrid", {"recompute": "full"}), ("cp 2 ring", {"chunk": 40})):
        sent = []
        for changed in (SECTIONS["model"], model):
            sections = {**SECTIONS, "model": changed, "memory": memory}
            spread = make_plan(with_layout(make_job(**sections), parse_layout(layout)))
            found = pool.run(step_bytes, spread[1].world, spread)
            assert all(seen["sent"] == seen["formula"] for seen in found), layout
            sent.append(sum(seen["sent"]["send"] for seen in found))
        assert sent[1] < sent[0], layout


def test_bytes_of_an_encoder_and_a_decoder(pool: RankPool) -> None:
    """Keys of both go to all ranks of a ring, or heads are exchanged."""
    sections = {"model": {"family": "t5", "vocab": 16, "layers": 3}, "train": {"global_batch": 2}}
    for layout in ("cp 2 ring", "cp 2 ulysses × tp 2", "cp 4 hybrid"):
        spread = make_plan(with_layout(make_job(**sections, memory={"recompute": "full"}), parse_layout(layout)))
        for seen in pool.run(step_bytes, spread[1].world, spread):
            assert seen["sent"] == seen["formula"] and seen["sent"]["all_to_all"] > 0, layout


def test_merged_blocks_equal_full_attention() -> None:
    """Keys in two parts, merged, and a query that attends to none of the first."""
    (q, k, v, dout), _ = draw({**BASE, "kv": 2})
    whole, lse = attend(q, k, v, KeyLimits(False))
    parts = [attend(q, k[:, s], v[:, s], KeyLimits(False)) for s in (slice(0, 5), slice(5, None))]
    out, log = merge(parts[0][0].float(), parts[0][1], *parts[1])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(log, lse)
    docs = Docs(torch.tensor([[0] * 4 + [9] * 12] * 2), torch.zeros((2, 16), dtype=torch.int64))
    some, log = attend(q, k, v, KeyLimits(False, docs))
    assert torch.equal(some[:, 4:], torch.zeros_like(some[:, 4:])) and bool((log[:, :, 4:] == float("-inf")).all())
    assert all(g.isfinite().all() for g in attend_backward(dout, q, k, v, some, log, KeyLimits(False, docs)))
    assert REFERENCE.masks and REFERENCE.segments and REFERENCE.window


def test_style_depends_on_heads_links_and_length() -> None:
    h100, nvlink, ndr = 989e12, 450e9, 50e9
    assert choose_style(8, 8, 32, 8, 16384, 2, h100, nvlink)[:2] == ("ring", 1)
    assert choose_style(8, 8, 32, 8, 128, 2, h100, nvlink)[:2] == ("ulysses", 8)
    assert choose_style(16, 8, 32, 8, 512, 2, h100, ndr)[:2] == ("hybrid", 8)
    style, group, why = choose_style(8, 8, 6, 6, 128, 2, h100, nvlink)
    assert (style, group) == ("hybrid", 2)
    assert "2 ranks" in why
    assert choose_style(8, 8, 32, 8, 16384, 2, h100, nvlink, at_once=True)[:2] == ("ulysses", 8)
    assert choose_style(3, 8, 4, 4, 16384, 2, h100, nvlink, at_once=True)[:2] == ("ring", 1)
