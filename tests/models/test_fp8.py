"""fp8 linear layers: scaled products, gradients, shapes, the gated part, the head, and torch.compile."""

from __future__ import annotations

from functools import partial

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
    largest,
    scale_for,
    scaled_mm,
)
from weft.models.loss import HeadProducts, linear_cross_entropy
from weft.parallel.fp8 import use_fp8

RECIPES = [Fp8Recipe(), Fp8Recipe(scaling="rowwise"), Fp8Recipe(amax="delayed")]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_scaled_mm_agrees_with_torch() -> None:
    """The private name is still there, with these arguments, and multiplies as we do on a CPU."""
    a, b = random(16, 32).to(E5M2), random(48, 32).to(E4M3).t()
    two, half = torch.tensor(2.0), torch.tensor(0.5)
    theirs = torch._scaled_mm(a, b, two, half, out_dtype=torch.bfloat16, use_fast_accum=False)
    torch.testing.assert_close(scaled_mm(a, b, two, half, False), theirs)
    rows, columns = torch.full((16, 1), 2.0), torch.full((1, 48), 0.5)
    torch.testing.assert_close(scaled_mm(a, b, rows, columns, True), theirs)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-20, 3e-4, 1.0, 440.0, 1e9])
def test_scale_is_the_largest_power_of_two_in_range(dtype: torch.dtype, size: float) -> None:
    x = random(8, 8) * size
    scale = scale_for(largest(x), dtype)
    top, limit = float(largest(x) * scale), torch.finfo(dtype).max
    assert limit / 2 < top <= limit
    assert float(scale.log2()) == round(float(scale.log2()))
    back = cast(x, scale, dtype).float() / scale
    big = x.abs() > largest(x) / 64
    assert float(((back - x) / x)[big].abs().max()) <= {E4M3: 2**-4, E5M2: 2**-3}[dtype]


def test_zeros_and_overflow() -> None:
    assert torch.equal(cast(torch.zeros(4), scale_for(torch.zeros(()), E4M3), E4M3).float(), torch.zeros(4))
    assert cast(torch.tensor([1e6, -1e6]), torch.tensor(1.0), E4M3).float().tolist() == [448.0, -448.0]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.scaling} {r.amax}")
@pytest.mark.parametrize("tokens", [(2, 16), (3, 5), (1,)])
def test_close_to_bf16(recipe: Fp8Recipe, tokens: tuple[int, ...]) -> None:
    """Any number of tokens; also after a first step, when delayed scales come from before."""
    maxima = AmaxHistory(4, torch.device("cpu")) if recipe.amax == "delayed" else None
    plain = nn.Linear(32, 48).bfloat16()
    w, b = plain.weight, plain.bias
    for _ in range(2):
        x = random(*tokens, 32).bfloat16().requires_grad_()
        found = torch.autograd.grad(fp8_linear(x, w, b, recipe, maxima).float().square().sum(), (x, w, b))
        wanted = torch.autograd.grad(plain(x).float().square().sum(), (x, w, b))
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.1
        if maxima is not None:
            assert maxima.seen[:2].tolist() == [float(largest(t.detach())) for t in (x, w)] and maxima.seen[2] > 0
            maxima.past.copy_(maxima.seen)
            maxima.known = True


def test_rowwise_scaling_confines_an_outlier_to_its_row() -> None:
    x, w = random(32, 64) * 1e-3, random(16, 64)
    x[0, 0] = 3e4
    errors = []
    for recipe in RECIPES[:2]:
        y = fp8_linear(x.bfloat16(), w.bfloat16(), None, recipe)[1:].float()
        exact = x[1:] @ w.t()
        errors.append(float((y - exact).norm() / exact.norm()))
    assert errors[1] < 0.05 < 0.5 < errors[0]


def test_evaluation_does_not_update_the_history() -> None:
    maxima = AmaxHistory(4, torch.device("cpu"))
    with torch.no_grad():
        fp8_linear(random(16, 32).bfloat16(), random(16, 32).bfloat16(), None, RECIPES[2], maxima)
    assert maxima.seen.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.scaling} {r.amax}")
def test_compiles_without_graph_breaks(recipe: Fp8Recipe) -> None:
    """No break in the graph; the same numbers; the gradient's maximum is seen in the compiled backward pass, too."""
    x, w = random(16, 32).bfloat16(), random(48, 32).bfloat16().requires_grad_()
    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        maxima = AmaxHistory(4, torch.device("cpu")) if recipe.amax == "delayed" else None
        y = wrap(fp8_linear)(x, w, None, recipe, maxima)
        (dw,) = torch.autograd.grad(y.float().square().sum(), w)
        results.append((y, dw, maxima.seen if maxima else y))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def gated(recipe: Fp8Recipe, dim: int = 32, ffn: int = 48) -> FeedForward:
    """A feed-forward part in fp8 that has seen a step."""
    model = Model(family="llama", dim=dim, ffn=ffn, activation="swiglu", bias=False)
    module = FeedForward(model).bfloat16()
    for p in module.parameters():
        p.data.copy_(random(*p.shape) * 0.2)
    use_fp8(list(module.named_modules(prefix="mlp")), recipe)
    return module


@pytest.mark.parametrize("compiled", [False, True])
def test_fused_gated_part_agrees_with_separate_layers(compiled: bool) -> None:
    """Its products are those of its three layers with the same delayed scales, and so are the maxima it notes."""
    apart, joined = gated(RECIPES[2]), gated(RECIPES[2])
    assert type(joined) is Fp8FeedForward
    apart.__class__ = FeedForward
    call = torch.compile(joined, backend="aot_eager", fullgraph=True) if compiled else joined
    for _ in range(3):
        x = random(3, 5, 32).bfloat16()
        found = []
        for module, run in ((apart, apart), (joined, call)):
            inputs = x.clone().requires_grad_()
            y = run(inputs, None)
            grads = torch.autograd.grad(y.float().square().sum(), (inputs, *module.parameters()))
            layers = [m.maxima for m in module.modules() if isinstance(m, Fp8Linear)]
            found.append((y.detach(), *grads, torch.stack([m.seen for m in layers if m]).clone()))
            for m in layers:
                assert m is not None
                m.past.copy_(m.seen)
                m.seen.zero_()
                m.known = True
        for one, other in zip(*found, strict=True):
            assert float((one - other).float().norm() / one.float().norm()) < 0.05
    assert joined.past.equal(torch.stack([m.past for m in joined.layers]))


def test_unsuitable_gated_parts_are_not_fused() -> None:
    assert type(gated(RECIPES[0])) is FeedForward
    assert type(gated(Fp8Recipe(amax="delayed", skip=("*.down",)))) is FeedForward


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [40, 33])
def test_fp8_head(tokens: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and both gradients are near those of bf16, in one chunk and in several."""
    weight = (random(96, 32) * 0.2).bfloat16().requires_grad_()
    x = random(tokens, 32).bfloat16().requires_grad_()
    targets, valid = torch.arange(tokens) % 96, torch.arange(tokens) % 5 > 0

    def go(products: object) -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x, weight, targets, valid, smoothing, products=products)  # type: ignore[arg-type]
        return loss, *torch.autograd.grad(loss, [x, weight])

    plain, low = go(HeadProducts), partial(Fp8HeadProducts, recipe=Fp8Recipe(head=True))
    for at_once in (1 << 26, 96 * 4 * 17):
        monkeypatch.setattr("weft.models.loss.LOGITS_BYTES", {"cpu": at_once, "cuda": at_once})
        monkeypatch.setattr("weft.models.fp8.fp8_head.LOGITS_BYTES", {"cpu": at_once})
        for mine, theirs in zip(go(low), plain, strict=True):
            assert mine.dtype == theirs.dtype
            assert float(((mine - theirs).norm() / theirs.norm()).detach()) < 0.08
    assert torch.equal(go(low)[1][~valid], torch.zeros_like(x)[~valid])
