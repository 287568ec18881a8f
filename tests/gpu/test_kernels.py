"""Every Triton kernel against a plain torch reference, over odd shapes and dtypes.

On CPUs they run under Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_kernels.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.memory.split_kernels import join_kernel, round_kernel, split_kernel
from weft.mesh import Mesh
from weft.models import loss_kernels
from weft.models.experts import grouped_kernels
from weft.models.feedforward import FeedForward
from weft.models.fp8 import fp8_gated, fp8_kernels
from weft.models.fp8.fp8_linear import E4M3, E5M2, Fp8Recipe, cast
from weft.optim.adamw_kernels import adamw_, corrections_of
from weft.optim.codec_kernels import decode_8bit, encode_8bit, round_bits
from weft.optim.coded_adamw_kernels import coded_adamw_
from weft.optim.state_codecs import (
    BF16,
    EIGHT_BITS,
    LEVELS,
    POWERS,
    CodedState,
    numbers_of_rows,
    round_to_24_bits_,
    rounding_of,
)
from weft.parallel.fp8 import DelayedScales, use_fp8

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FP8 = [E4M3, E5M2]


def cases(*every: Any, interpreted: int = 1) -> tuple[Any, ...]:
    """All of them on a GPU; the last ones, the odd ones, under the interpreter, which is slow."""
    return every[-interpreted:] if INTERPRETED else every


FLOATS = cases(torch.float16, torch.float32, torch.bfloat16, interpreted=2)
MATRICES = cases((1, 1), (1, 130), (16, 16), (63, 65), (64, 128), (257, 129), (70, 33))
SIZES = cases(1, 2048, 10_007, 7, 2049)
VOCABULARIES = cases((1, 1, 1), (5, 257, 257), (3, 20_001, 20_001), (2, 8193, 8200), (3, 2, 5), interpreted=2)
EXPERT_ROWS = cases((0, 8), (1, 1), (130, 1000), (33, 64), (5, 17), interpreted=2)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def rounded(found: Tensor, exact: Tensor) -> bool:
    """Whether fp32 values were rounded as torch does. The interpreter truncates, and does not carry into the exponent
    of fp8: there the last digit may differ, and values just below a power of two are left out."""
    if not INTERPRETED:
        return same_bytes(found, exact.to(found.dtype))
    return float(_off(found, exact).max()) <= torch.finfo(found.dtype).smallest_normal


def _off(found: Tensor, right: Tensor) -> Tensor:
    """Difference beyond one step of the dtype."""
    off = (found.float() - right).abs() - torch.finfo(found.dtype).eps * right.abs()
    small = found.dtype.itemsize == 1 and INTERPRETED
    return torch.where(right.abs().frexp().mantissa > 0.9, -1.0, off) if small else off


@pytest.mark.parametrize("taken", [1, 0])
@pytest.mark.parametrize("copy", cases(torch.float16, None, torch.bfloat16))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_adamw(size: int, dtype: torch.dtype, copy: torch.dtype | None, taken: int) -> None:
    lr, betas, eps, decay, step, factor = 3e-3, (0.9, 0.95), 1e-8, 0.1, 3.0, 0.25
    master, mean, square = random(size), random(size, seed=1), random(size, seed=2).abs()
    grad = random(size, dtype=dtype, seed=3)
    before = [t.clone() for t in (master, mean, square)]
    compute = None if copy is None else torch.zeros(size, dtype=copy, device=DEVICE)
    adamw_(
        master, compute, grad, mean, square, torch.tensor(factor, device=DEVICE),
        torch.tensor(taken, dtype=torch.int32, device=DEVICE),
        corrections_of(torch.tensor(step, device=DEVICE), betas), lr, betas, eps, decay,
    )  # fmt: skip
    w, m, v = (t.double() for t in before)
    g = grad.double() * factor
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    w = w * (1 - lr * decay)
    w = w - lr / (1 - betas[0] ** step) * m / (v.sqrt() / (1 - betas[1] ** step) ** 0.5 + eps)
    wanted = (w, m, v) if taken else before
    for found, right in zip((master, mean, square), wanted, strict=True):
        torch.testing.assert_close(found, right.float(), rtol=2e-6 if taken else 0, atol=2e-6 if taken else 0)
    if compute is not None:
        assert rounded(compute, master if taken else torch.zeros_like(master))


@pytest.mark.parametrize("columns", cases(16, 4096, 200))
@pytest.mark.parametrize("step", cases(None, 3, interpreted=2))
def test_smaller_states(columns: int, step: int | None) -> None:
    """Kernels of codecs write the bits of the plain operations on a CPU."""
    values = torch.randn(6, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 0, columns)
    values[0], values[2, 3] = 0.0, 0.0
    rounding = None if step is None else rounding_of(0, step, "w", "m", values, numbers_of_rows(values, 0, 6))
    keys = None if rounding is None else (rounding.rows.to(DEVICE), *rounding.keys[1:])
    for kind, codec in EIGHT_BITS.items():
        given = values.square() if kind == "unsigned" else values
        stored = torch.zeros(codec.stored_shape(tuple(given.shape)), dtype=torch.uint8)
        found = torch.zeros_like(stored, device=DEVICE)
        codec.encode(given, stored, rounding)
        encode_8bit(given.to(DEVICE), found, LEVELS[kind], POWERS[kind], keys)
        assert torch.equal(found.cpu(), stored)
        decoded = torch.empty_like(given, device=DEVICE)
        decode_8bit(found, decoded, LEVELS[kind], POWERS[kind])
        assert same_bytes(decoded.cpu(), codec.decode(stored, tuple(given.shape)))
    stored, found = torch.zeros_like(values, dtype=torch.bfloat16), values.to(DEVICE, torch.bfloat16)
    BF16.encode(values, stored, rounding)
    round_bits(values.to(DEVICE), found, 16, keys)
    assert same_bytes(found.cpu(), stored)
    master = values.to(DEVICE, copy=True)
    round_bits(master, master, 8, keys)
    round_to_24_bits_(values, rounding)
    assert same_bytes(master.cpu(), values)


@pytest.mark.parametrize("low", ["none", "16 bits", "8 bits"])
@pytest.mark.parametrize("taken", [1, 0])
@pytest.mark.parametrize("columns", cases(16, 4096, 200))
def test_adamw_with_smaller_states(columns: int, taken: int, low: str) -> None:
    """One kernel writes the bits of decoding, AdamW and encoding."""
    shape, betas = (6, columns), (0.9, 0.95)
    master, mean, square = (random(*shape, seed=s) for s in range(3))
    square, grad = square.square(), random(*shape, dtype=torch.bfloat16, seed=3)
    grad[0] = 0.0
    numbers = numbers_of_rows(master, 0, 6)
    rounding = {kind: rounding_of(0, 3, "w", kind, master, numbers) for kind in ("exp_avg", "exp_avg_sq", "low")}
    if low == "8 bits":
        round_bits(master, master, 8, None)
    high = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    half = torch.zeros(shape, dtype=torch.int16, device=DEVICE)
    split_kernel(master, high, half)
    moments = {}
    for name, kind, values in (("exp_avg", "signed", mean), ("exp_avg_sq", "unsigned", square)):
        stored = torch.zeros(EIGHT_BITS[kind].stored_shape(shape), dtype=torch.uint8, device=DEVICE)
        encode_8bit(values, stored, LEVELS[kind], POWERS[kind], None)
        decode_8bit(stored, values, LEVELS[kind], POWERS[kind])
        moments[name] = CodedState(stored, rounding[name])
    whole = {"none": master.clone(), "16 bits": half.clone()}
    byte = CodedState((half >> 8).to(torch.int8), rounding["low"])
    given, copy = byte if low == "8 bits" else whole[low], high.clone()
    rest = (
        torch.tensor(0.25, device=DEVICE), torch.tensor(taken, dtype=torch.int32, device=DEVICE),
        corrections_of(torch.tensor(3.0, device=DEVICE), betas), 3e-3, betas, 1e-8, 0.1,
    )  # fmt: skip
    before = [t.stored.clone() for t in moments.values()]
    coded_adamw_(given, copy, grad, moments["exp_avg"], moments["exp_avg_sq"], *rest)
    adamw_(master if low == "none" else half, high, grad, mean, square, *rest)
    if low == "8 bits" and taken:
        joined = join_kernel(high, half, None)
        round_bits(joined, joined, 8, rounding["low"].keys)
        split_kernel(joined, high, half)
    for (name, kind, values), old in zip(
        (("exp_avg", "signed", mean), ("exp_avg_sq", "unsigned", square)), before, strict=True
    ):
        encoded = torch.zeros_like(old)
        encode_8bit(values, encoded, LEVELS[kind], POWERS[kind], rounding[name].keys)
        assert torch.equal(moments[name].stored, encoded if taken else old)
    assert same_bytes(copy, high)
    if low == "8 bits":
        assert torch.equal(byte.stored, (half >> 8).to(torch.int8))
    else:
        assert same_bytes(whole[low], master if low == "none" else half)


def test_many_weights_are_rounded_as_one_is() -> None:
    sources = [random(*shape, seed=i) for i, shape in enumerate(((3, 5), (2048,), (1, 4099), (0,), (7, 300)))]
    targets, right = ([torch.zeros_like(s, dtype=torch.bfloat16) for s in sources] for _ in range(2))
    round_kernel(targets, sources)
    for source, target, expected in zip(sources, targets, right, strict=True):
        split_kernel(source, expected, None)
        assert same_bytes(target, expected)


@pytest.mark.parametrize("smoothing", cases(0.0, 0.1))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "vocab", "stride"), VOCABULARIES)
@pytest.mark.parametrize("in_place", [True, False])
def test_cross_entropy(
    rows: int, vocab: int, stride: int, dtype: torch.dtype, smoothing: float, in_place: bool
) -> None:
    logits = (4 * random(rows, stride)).to(dtype)[:, :vocab]
    targets = torch.arange(rows, device=DEVICE) * 7919 % vocab
    valid = torch.arange(rows, device=DEVICE) % 3 != 1
    targets = torch.where(
        valid, targets, torch.tensor([-100, 10**12], device=DEVICE)[torch.arange(rows, device=DEVICE) % 2]
    )
    exact = logits.double().requires_grad_()  # torch's sums in fp32 are off by 1e-5 on some CPUs
    losses = F.cross_entropy(exact, torch.where(valid, targets, 0), reduction="none", label_smoothing=smoothing)
    right = (losses * valid).sum()
    grad, right = torch.autograd.grad(right, exact)[0].float(), right.detach().float()
    plain = loss_kernels.cross_entropy(logits, targets, valid, smoothing, None).sum()
    room = logits if in_place else torch.full((rows, vocab), 7.0, dtype=torch.float32, device=DEVICE)
    times = 1.0 if in_place else 2.0**10
    found = loss_kernels.cross_entropy(logits, targets, valid, smoothing, room, times).sum()
    torch.testing.assert_close(plain, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    step = torch.finfo(room.dtype).eps
    torch.testing.assert_close(room.float() / times, grad, rtol=2 * step + 1e-5, atol=step * 1e-2 + 1e-6)


@pytest.mark.parametrize("low", FP8)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", MATRICES)
def test_casts_and_transposes(shape: tuple[int, int], dtype: torch.dtype, low: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    for size in (8.0, 2.0**18):  # the second exceeds the range, which clamps
        scale = torch.tensor(size, device=DEVICE)
        by_rows, by_columns, seen = fp8_kernels.cast_both(x, scale, low)
        right = cast(x, scale, low)
        exact = (x.float() * scale).clamp(-torch.finfo(low).max, torch.finfo(low).max)
        assert rounded(by_rows, exact) and same_bytes(by_columns, by_rows.t())
        assert seen.item() == x.abs().max().item()
        assert rounded(fp8_kernels.cast_rows(x, scale, low), exact)
        assert same_bytes(fp8_kernels.cast_columns(x, scale, low), by_columns)
        again, seen_again = fp8_kernels.cast_seen(x, scale, low)
        assert same_bytes(again, by_rows) and torch.equal(seen, seen_again)
    out = torch.zeros(shape[1], shape[0] + 5, device=DEVICE).to(low)
    fp8_kernels.transpose(right, out[:, : shape[0]])
    assert same_bytes(out[:, : shape[0]], right.t())
    assert not out[:, shape[0] :].float().any(), "nothing is written beside the transpose"


def close_fp8(found: Tensor, exact: Tensor, scale: Tensor) -> None:
    """Within one step of fp8 of an exact value: exponentials differ in their last bits."""
    limit = torch.finfo(found.dtype).max
    right = (exact.float() * scale).clamp(-limit, limit)
    assert float(_off(found, right).max()) <= torch.finfo(found.dtype).smallest_normal


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", MATRICES)
def test_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, up, grad = (random(*shape, dtype=dtype, seed=i) for i in range(3))
    g, u, d = (t.float() for t in (gate, up, grad))
    scale = torch.tensor(16.0, device=DEVICE)
    h, seen = fp8_kernels.swiglu(gate, up, scale, E4M3)
    close_fp8(h, F.silu(g) * u, scale)
    torch.testing.assert_close(seen[0], (F.silu(g) * u).abs().max(), rtol=1e-5, atol=1e-6)
    scales = torch.tensor(32.0, device=DEVICE), scale
    *made, seen_gate, seen_up = fp8_kernels.swiglu_back(gate, up, grad, *scales, scale, E5M2, E4M3)
    s = torch.sigmoid(g)
    for i, exact in enumerate((d * u * s * (1 + g * (1 - s)), d * g * s)):
        close_fp8(made[2 * i], exact, scales[i])
        assert same_bytes(made[2 * i].t(), made[2 * i + 1])
        torch.testing.assert_close((seen_gate, seen_up)[i][0], exact.abs().max(), rtol=1e-5, atol=1e-6)
    assert same_bytes(made[4], h.t()), "the result of the forward pass"


class GatedBlock(nn.Module):
    """A linear layer and a gated part, whose maxima are rows of the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)
        self.mlp = FeedForward(Model(family="llama", dim=32, ffn=48, activation="swiglu", bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x + self.linear(x), None)
        return y


def test_compiled_layers_record_maxima_in_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operation writes into a view of a table, torch.compile puts at the wrong place of the table."""
    for name, given in (
        ("cast_seen", fp8_kernels.cast_seen), ("cast_both", fp8_kernels.cast_both),
        ("cast_columns", fp8_kernels.cast_columns),
        ("swiglu", lambda *args: fp8_kernels.swiglu(*args, E4M3)),
        ("swiglu_back", lambda *args: fp8_kernels.swiglu_back(*args, E5M2, E4M3)),
    ):  # fmt: skip
        monkeypatch.setattr(fp8_gated, name, given)
    found = []
    for compiled in (False, True):
        model = nn.Sequential(GatedBlock(), GatedBlock()).to(DEVICE).bfloat16()
        for i, p in enumerate(model.parameters()):
            p.data.copy_(random(*p.shape, seed=i) * 0.2)
        use_fp8(list(model.named_modules()), Fp8Recipe(amax="delayed", history=2))
        scales = DelayedScales(model, Mesh(0, 1, DEVICE, None, {}, None, None, None))
        for block in model if compiled else ():
            block.compile(backend="aot_eager")
        for step in range(3):
            model(random(16, 32, seed=step).bfloat16()).float().square().mean().backward()
            if step < 2:
                scales.step()
        found.append(scales.seen)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", cases(1, 8, 2))
@pytest.mark.parametrize(("tokens", "width"), EXPERT_ROWS)
def test_rows_of_experts(tokens: int, width: int, k: int, dtype: torch.dtype) -> None:
    places = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(1)).view(tokens, k).to(DEVICE)
    x, weights = random(tokens, width, dtype=dtype), random(tokens, k, dtype=dtype, seed=2)
    rows = grouped_kernels.spread(x, places)
    expected = torch.empty_like(rows)
    expected[places.flatten()] = x.repeat_interleave(k, 0)
    assert torch.equal(rows, expected)
    rows, grad = random(tokens * k, width, dtype=dtype, seed=3), random(tokens, width, dtype=dtype, seed=4)
    uses = rows.float()[places.flatten()].view(tokens, k, width)
    tolerance = {"rtol": 2.0**-7, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(grouped_kernels.gather(rows, None, places).float(), uses.sum(1), **tolerance)
    weighted = (uses * weights.float()[..., None]).sum(1)
    torch.testing.assert_close(grouped_kernels.gather(rows, weights, places).float(), weighted, **tolerance)
    of_rows, of_weights = grouped_kernels.gather_back(grad, rows, weights, places)
    right = torch.empty_like(rows, dtype=torch.float32)
    right[places.flatten()] = (grad.float()[:, None] * weights.float()[..., None]).flatten(0, 1)
    torch.testing.assert_close(of_rows.float(), right, **tolerance)
    by_weight = (uses * grad.float()[:, None]).sum(2)
    scale = width**0.5
    torch.testing.assert_close(of_weights.float(), by_weight, rtol=tolerance["rtol"], atol=tolerance["atol"] * scale)


def test_sums_are_deterministic() -> None:
    """The same bytes every time, as for runs that resume."""
    tokens = cases(64, 3)[0]
    rows, weights = random(8 * tokens, 130, dtype=torch.bfloat16), random(tokens, 8, dtype=torch.bfloat16)
    places = torch.randperm(8 * tokens, generator=torch.Generator().manual_seed(0)).view(tokens, 8).to(DEVICE)
    first = grouped_kernels.gather(rows, weights, places)
    assert all(same_bytes(first, grouped_kernels.gather(rows, weights, places)) for _ in range(5))
