"""fp8 on the GPU: scaled products, linear layers, the fused gated part, delayed scales and the head."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.job.schema import Model
from weft.models.feedforward import FeedForward
from weft.models.fp8.fp8_gated import Fp8FeedForward
from weft.models.fp8.fp8_head import Fp8HeadProducts
from weft.models.fp8.fp8_linear import (
    E4M3,
    E5M2,
    AmaxHistory,
    Fp8Linear,
    Fp8Recipe,
    cast,
    fp8_linear,
    scale_for,
    scaled_mm,
)
from weft.models.loss import HeadProducts, PaddedHeadProducts, head_products, linear_cross_entropy
from weft.parallel.fp8 import use_fp8

DEVICE = torch.device("cuda")
RECIPES = [
    Fp8Recipe(), Fp8Recipe(scaling="rowwise"), Fp8Recipe(amax="delayed"), Fp8Recipe(fast_accumulation="all"),
    Fp8Recipe(fast_accumulation="none"),
]  # fmt: skip


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).float().norm() / right.float().norm().clamp(min=1e-9))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (48, 32, 80), (256, 1024, 512)])
def test_scaled_products(m: int, k: int, n: int, left: torch.dtype, fast: bool) -> None:
    """The product of fp8 factors is that of their values in fp32, for one scale and for scales by row and column."""
    a, b = random(m, k).to(left), random(n, k).to(E4M3).t()
    exact = a.float() @ b.float()
    two, half = torch.tensor(2.0, device=DEVICE), torch.tensor(0.25, device=DEVICE)
    assert error(scaled_mm(a, b, two, half, fast), exact / 2) < 4e-3
    if left == E4M3:
        rows, columns = random(m, 1).abs() + 0.5, random(1, n).abs() + 0.5
        assert error(scaled_mm(a, b, rows, columns, fast), exact * rows * columns) < 4e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [(1,), (3, 5), (257,), (2, 64)])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.scaling} {r.amax} {r.fast_accumulation}")
def test_linear_is_close_to_bf16(recipe: Fp8Recipe, tokens: tuple[int, ...], compiled: bool) -> None:
    torch.compiler.reset()  # dynamo compiles one function at most 8 times
    plain = nn.Linear(64, 96).to(DEVICE).bfloat16()
    w, b = plain.weight, plain.bias
    maxima = AmaxHistory(4, DEVICE) if recipe.amax == "delayed" else None
    call: Any = torch.compile(fp8_linear, fullgraph=True) if compiled else fp8_linear
    for _ in range(2):
        x = random(*tokens, 64).bfloat16().requires_grad_()
        found = torch.autograd.grad(call(x, w, b, recipe, maxima).float().square().sum(), (x, w, b))
        right = torch.autograd.grad(plain(x).float().square().sum(), (x, w, b))
        for mine, theirs in zip(found, right, strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and error(mine, theirs) < 0.1
        if maxima is not None:
            assert maxima.seen[:2].tolist() == [float(t.detach().abs().max()) for t in (x, w)] and maxima.seen[2] > 0
            maxima.past.copy_(maxima.seen)
            maxima.known = True


def gated(recipe: Fp8Recipe, dim: int, ffn: int) -> FeedForward:
    module = FeedForward(Model(family="llama", dim=dim, ffn=ffn, activation="swiglu", bias=False)).to(DEVICE).bfloat16()
    for p in module.parameters():
        p.data.copy_(random(*p.shape) * 0.2)
    use_fp8(list(module.named_modules(prefix="mlp")), recipe)
    return module


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dim", "ffn", "tokens"), [(64, 96, 15), (256, 704, 130)])
def test_fused_gated_part(dim: int, ffn: int, tokens: int, compiled: bool) -> None:
    """The Triton kernels agree with three separate layers with the same delayed scales, and record the same maxima."""
    recipe = Fp8Recipe(amax="delayed")
    separate, fused = gated(recipe, dim, ffn), gated(recipe, dim, ffn)
    assert type(fused) is Fp8FeedForward
    separate.__class__ = FeedForward
    call: Any = torch.compile(fused) if compiled else fused
    for _ in range(3):
        x = random(tokens, dim).bfloat16()
        found = []
        for module, run in ((separate, separate), (fused, call)):
            inputs = x.clone().requires_grad_()
            y = run(inputs, None)
            grads = torch.autograd.grad(y.float().square().sum(), (inputs, *module.parameters()))
            layers = [m.maxima for m in module.modules() if isinstance(m, Fp8Linear) and m.maxima is not None]
            found.append((y.detach(), *grads, torch.stack([m.seen for m in layers]).clone()))
            for m in layers:
                m.past.copy_(m.seen)
                m.seen.zero_()
                m.known = True
        for one, other in zip(*found, strict=True):
            assert error(one, other) < 0.08


def test_delayed_scales_clamp_a_sudden_outlier() -> None:
    """A value beyond the range of the previous steps' scale becomes the largest one, not infinite, and is recorded."""
    maxima = AmaxHistory(4, DEVICE)
    maxima.past.fill_(1.0)
    maxima.known = True
    x, w = random(32, 64).bfloat16(), random(48, 64).bfloat16()
    x[3, 5] = 3e4
    y = fp8_linear(x.requires_grad_(), w, None, Fp8Recipe(amax="delayed"), maxima)
    assert bool(torch.isfinite(y).all()) and float(maxima.seen[0]) == float(x.detach().abs().max())
    scale = scale_for(maxima.past[0], E4M3)
    assert float(cast(x.detach(), scale, E4M3).float()[3, 5]) == 448.0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [1, 33, 160])
def test_head(tokens: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and both gradients are near those of fp32, in bf16 and in fp8, in one chunk and in several."""
    vocab, dim = 1040, 64
    weight = (random(vocab, dim) * 0.2).bfloat16().requires_grad_()
    x = random(tokens, dim).bfloat16().requires_grad_()
    targets, valid = torch.arange(tokens, device=DEVICE) * 31 % vocab, torch.arange(tokens, device=DEVICE) % 5 != 1
    logits = x.float() @ weight.float().t()
    losses = nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    exact_loss = (losses * valid).sum()
    exact = (exact_loss, *torch.autograd.grad(exact_loss, [x, weight]))
    low = partial(Fp8HeadProducts, recipe=Fp8Recipe(head=True))
    for products, limit in (HeadProducts, 0.01), (PaddedHeadProducts, 0.01), (low, 0.08):
        for at_once in (1 << 26, vocab * 2 * 17):
            monkeypatch.setattr("weft.models.loss.LOGITS_BYTES", {"cpu": at_once, "cuda": at_once})
            monkeypatch.setattr("weft.models.fp8.fp8_head.LOGITS_BYTES", {"cpu": at_once, "cuda": at_once})
            loss = linear_cross_entropy(x, weight, targets, valid, smoothing, products=products)
            found = (loss, *torch.autograd.grad(loss, [x, weight]))
            for mine, right in zip(found, exact, strict=True):
                assert error(mine.detach(), right.detach()) < limit
            assert torch.equal(found[1][~valid], torch.zeros_like(x)[~valid])


def test_unaligned_vocabulary_is_padded() -> None:
    x, valid = random(64, 64).bfloat16().requires_grad_(), torch.ones(64, dtype=torch.bool, device=DEVICE)
    weight = (random(1043, 64) * 0.2).bfloat16().requires_grad_()
    targets = torch.arange(64, device=DEVICE) * 16
    exact_loss = nn.functional.cross_entropy(x.float() @ weight.float().t(), targets, reduction="sum")
    exact = (exact_loss, *torch.autograd.grad(exact_loss, [x, weight]))
    loss = linear_cross_entropy(x, weight, targets, valid)
    assert isinstance(head_products(x, weight, 64), PaddedHeadProducts)
    for mine, right in zip((loss, *torch.autograd.grad(loss, [x, weight])), exact, strict=True):
        assert error(mine.detach(), right.detach()) < 0.01
