"""Mixture of experts against a per-token reference: outputs, gradients, losses, groups, capacity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from weft.job.schema import Model
from weft.models.attention import TokenInfo
from weft.models.experts.grouped import product
from weft.models.experts.mixture_of_experts import MixtureOfExperts
from weft.models.kernel_internals import grouped_mm

BATCH, SEQ, DIM = 3, 7, 8


def make(activation: str = "swiglu", **experts: Any) -> MixtureOfExperts:
    fields = {"count": 6, "top_k": 2, "ffn": 10, **experts}
    model = Model.model_validate({"dim": DIM, "ffn": 16, "bias": True, "activation": activation, "experts": fields})
    torch.manual_seed(0)
    made = MixtureOfExperts(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5)
    return made


def where(length: int = SEQ) -> TokenInfo:
    return TokenInfo(None, None, None, torch.arange(SEQ), length)


def expert(moe: MixtureOfExperts, e: int, x: Tensor) -> Tensor:
    parts = moe.experts
    up = x @ parts.up.weight[e].t()
    hidden = F.gelu(up, approximate="tanh") if parts.gate is None else F.silu(x @ parts.gate.weight[e].t()) * up
    return hidden @ parts.down.weight[e].t()


def by_hand(moe: MixtureOfExperts, x: Tensor, length: int = SEQ) -> tuple[Tensor, Tensor]:
    """The output and the auxiliary losses as they are defined, one token after the other."""
    o = moe.options
    out, losses = [], torch.zeros(())
    room = -int(-(o.capacity or 1e9) * length * o.top_k // o.count)
    for sequence in x:
        taken, asked, shares, rows = [0] * o.count, torch.zeros(o.count), [], []
        for place, token in enumerate(sequence):
            logits = moe.router.weight @ token
            scores = logits.softmax(0) if o.router == "softmax" else logits.sigmoid()
            ranked = (scores if moe.bias is None else scores + moe.bias).detach()
            if o.top_groups:
                groups = ranked.view(o.groups, -1)
                good = groups.topk(2 if o.router == "sigmoid" else 1, -1).values.sum(-1).topk(o.top_groups).indices
                mask = torch.full_like(groups, float("-inf"))
                mask[good] = 0
                ranked = (groups + mask).flatten()
            chosen = ranked.topk(o.top_k).indices.tolist()
            divided = o.renormalize or (o.renormalize is None and o.top_k > 1)
            weights = scores[chosen] / scores[chosen].sum() if divided else scores[chosen]
            y = torch.zeros(DIM)
            for e, weight in zip(chosen, weights, strict=True):
                if place < length:
                    asked[e] += 1
                    taken[e] += 1
                    if taken[e] <= room:
                        y = y + o.scale * weight * expert(moe, e, token)
            if place < length:
                shares.append(scores / scores.sum())
                losses = losses + o.z_weight * logits.logsumexp(0).square()
            rows.append(y if moe.shared is None else y + moe.shared(token, where()))
        over_even = asked * o.count / (o.top_k * length) if moe.past is None else moe.past
        losses = losses + moe.aux_weight * (over_even * torch.stack(shares).sum(0)).sum()
        out.append(torch.stack(rows))
    return torch.stack(out), losses


@pytest.mark.parametrize(
    ("activation", "experts", "length"),
    [
        ("swiglu", {}, SEQ),
        ("gelu", {"renormalize": False, "shared": 2, "z_weight": 0.3, "aux_weight": 0.7}, SEQ),
        ("swiglu", {"router": "sigmoid", "groups": 3, "top_groups": 2, "scale": 2.5, "balance": "bias"}, SEQ),
        ("swiglu", {"groups": 3, "top_groups": 1, "aux_scope": "batch", "aux_weight": 0.5}, SEQ),
        ("swiglu", {"capacity": 0.6, "top_k": 3, "aux_weight": 0.5, "z_weight": 0.1}, SEQ),
        ("swiglu", {"top_k": 1, "capacity": 0.9, "router": "sigmoid", "aux_weight": 0.2}, 5),
    ],
)
def test_agrees_with_a_per_token_reference(activation: str, experts: dict[str, Any], length: int) -> None:
    moe = make(activation, **experts)
    if moe.bias is not None:
        moe.bias.copy_(torch.linspace(-0.5, 0.5, 6))
    if moe.past is not None:
        moe.past.copy_(torch.linspace(0, 2, 6))
    x = torch.randn(BATCH, SEQ, DIM)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    wanted, losses = by_hand(moe, theirs, length)
    push = torch.randn_like(x)
    (3.0 * ((wanted * push).sum() + losses)).backward()
    expected = {n: p.grad for n, p in moe.named_parameters()}
    moe.zero_grad()
    moe.unit.fill_(3.0)  # the loss is multiplied by this, and so must its companions be
    y = moe(ours, where(length))
    (3.0 * (y * push).sum()).backward()
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4, msg=name)
    assert moe.tally[:6].sum() == BATCH * length * moe.options.top_k
    torch.testing.assert_close(float(moe.tally[-2:].sum()), float(losses.detach()), rtol=1e-4, atol=1e-4)
    assert (moe.tally[-3] > 0) == (moe.options.capacity is not None)


def test_evaluation_drops_and_counts_no_tokens() -> None:
    moe, free = make(capacity=0.3), make()
    x = torch.randn(BATCH, SEQ, DIM)
    with torch.no_grad():
        assert torch.equal(moe.eval()(x, where()), free(x, where()))
    assert moe.tally.sum() == 0


def test_capacity_does_not_depend_on_later_tokens() -> None:
    moe = make(capacity=0.5)
    x = torch.randn(1, SEQ, DIM)
    other = torch.cat([x[:, :4], torch.randn(1, SEQ - 4, DIM)], 1)
    assert torch.allclose(moe(x, where())[:, :4], moe(other, where())[:, :4])


def test_grouped_product_agrees_with_torch() -> None:
    """torch's has no public name in every version we support; this says what broke when it moves."""
    counts = torch.tensor([3, 0, 5])
    x, weight = torch.randn(8, 16).bfloat16(), torch.randn(3, 24, 16).bfloat16()
    theirs = grouped_mm(x, weight.transpose(-2, -1), counts.cumsum(0).to(torch.int32))
    torch.testing.assert_close(product(x, weight, counts), theirs, rtol=2e-2, atol=2e-2)


def test_a_split_backward_computes_each_product_once() -> None:
    """What autograd will go on to has no public name; this says what broke when it moves."""
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)
    y = product(x * 1, weight * 1, torch.tensor([1, 3])).sum()
    flops = []
    for asked in ([x], [weight], [x, weight]):
        with FlopCounterMode(display=False) as counted:
            torch.autograd.grad(y, asked, retain_graph=True)
        flops.append(counted.get_total_flops())
    assert flops == [120, 120, 240]
