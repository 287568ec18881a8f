"""Attention kernels (cuDNN, flash, torch's choice) against the fp32 reference: masks, documents, odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.models import attention_kernels as module
from weft.models.attention import TokenInfo, attention
from weft.models.attention_kernels import (
    KERNELS,
    REFERENCE,
    KeyLimits,
    attend,
    attend_backward,
    find_kernel,
    merge,
)
from weft.models.attention_sinks import attention_with_sinks
from weft.models.documents import Docs, find_segments, segments_of

DEVICE = "cuda"
Attend = Callable[..., Tensor]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def make(
    queries: int, keys: int, dtype: torch.dtype, head_dim: int = 64, heads: int = 4, kv: int = 2, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output."""
    random = torch.Generator(DEVICE).manual_seed(queries * 7 + keys)
    shapes = ((batch, n, count, head_dim) for n, count in ((queries, heads), (keys, kv), (keys, kv), (queries, heads)))
    q, k, v, dout = (torch.randn(s, generator=random, device=DEVICE).to(dtype) for s in shapes)
    return q, k, v, dout


def close(found: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    found, right = found.detach().float(), right.float()
    assert found.shape == right.shape and bool(torch.isfinite(found).all())
    assert float((found - right).norm()) <= TOLERANCE[dtype] * float(right.norm()) + 1e-7 * found.numel()


def reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, limits: KeyLimits) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients in fp32."""
    q, k, v, dout = (t.float() for t in (q, k, v, dout))
    out, lse = REFERENCE.forward(q, k, v, limits)
    return out, lse, *REFERENCE.backward(dout, q, k, v, out, lse, limits)


def assert_attends(function: Attend, tensors: tuple[Tensor, Tensor, Tensor, Tensor], info: TokenInfo) -> None:
    """Whether causal attention of a whole sequence, and its gradients, are those of the reference."""
    *inputs, dout = tensors
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = function(*leaves, True, info)
    right = reference(*tensors, info.limits(True))
    for mine, exact in zip((y, *torch.autograd.grad(y, leaves, dout)), (right[0], *right[2:]), strict=True):
        close(mine, exact, dout.dtype)


def test_fast_kernels_are_available() -> None:
    """cuDNN and flash run here and agree with the reference; else `attend` would silently be slow."""
    q, k, *_ = make(256, 256, torch.bfloat16)
    assert find_kernel(q, k, KeyLimits(True)).name == KERNELS["cuda"][0].name
    for kernel in KERNELS["cuda"]:
        assert kernel is REFERENCE or module._agrees(kernel, DEVICE, torch.bfloat16, 64, 2), kernel.name


@pytest.mark.parametrize("kernel", KERNELS["cuda"], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("length", "causal"), [(1, True), (17, True), (199, True), (199, False), (1024, True)])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_kernels(
    kernel: module.Kernel, dtype: torch.dtype, group: int, length: int, causal: bool, head_dim: int
) -> None:
    q, k, v, dout = make(length, length, dtype, head_dim, heads=2 * group)
    if length == 1 and not kernel.single:
        assert find_kernel(q, k, KeyLimits(True)).single
        return
    out, lse = kernel.forward(q, k, v, KeyLimits(causal))
    found = (out, lse, *kernel.backward(dout, q, k, v, out, lse, KeyLimits(causal)))
    for mine, right in zip(found, reference(q, k, v, dout, KeyLimits(causal)), strict=True):
        close(mine, right, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [32, 72, 192])
@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (64, 200), (200, 33)])
def test_attend_takes_any_shape(queries: int, keys: int, head_dim: int, dtype: torch.dtype) -> None:
    """`attend` finds a kernel for every shape and dtype; blocks that are not square are not causal."""
    q, k, v, dout = make(queries, keys, dtype, head_dim)
    causal = queries == keys
    out, lse = attend(q, k, v, KeyLimits(causal))
    found = (out, lse, *attend_backward(dout, q, k, v, out, lse, KeyLimits(causal)))
    for mine, right in zip(found, reference(q, k, v, dout, KeyLimits(causal)), strict=True):
        close(mine, right, dtype)


def test_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors too large for a kernel's 32-bit offsets are computed in groups of heads."""
    q, k, v, dout = make(256, 256, torch.bfloat16, heads=8, kv=4)
    whole = attend(q, k, v, KeyLimits(True))
    monkeypatch.setattr(module, "MAX_KERNEL_ELEMENTS", q.numel() // 4)
    out, lse = attend(q, k, v, KeyLimits(True))
    close(out, whole[0], torch.bfloat16)
    found = (out, lse, *attend_backward(dout, q, k, v, out, lse, KeyLimits(True)))
    for mine, right in zip(found, reference(q, k, v, dout, KeyLimits(True)), strict=True):
        close(mine, right, torch.bfloat16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_documents(causal: bool, dtype: torch.dtype) -> None:
    """Tokens attend within their document, in `attend` and in the attention of a whole sequence, with gradients: by a
    mask, and by segments in both samples, whose documents differ."""
    q, k, v, dout = make(130, 130, dtype)
    ids = torch.stack([torch.arange(130) // 37, (torch.arange(130) > 5).long() * 7]).to(DEVICE)
    found = segments_of(ids)
    assert found is not None and (found.most_queries, found.queries.tolist()) == (
        128,
        [0, 37, 74, 111, 130, 136, 260, 260, 260],
    )
    right = reference(q, k, v, dout, KeyLimits(causal, Docs(ids, ids)))
    for segments in (None, found):
        limits = KeyLimits(causal, Docs(ids, ids, segments))
        if dtype != torch.float32:
            assert find_kernel(q, k, limits).name == ("reference" if segments is None else "flash")
        out, lse = attend(q, k, v, limits)
        mine = (out, lse, *attend_backward(dout, q, k, v, out, lse, limits))
        for one, exact in zip(mine, right, strict=True):
            close(one, exact, dtype)
    plain = reference(q, k, v, dout, KeyLimits(causal))
    for docs, segments, wanted in ((ids, None, right), (ids, found, right), (None, None, plain)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        rows = torch.arange(130, device=DEVICE)
        y = attention(*leaves, causal, TokenInfo(None, docs, None, rows, 130, segments=segments))
        for one, exact in zip((y, *torch.autograd.grad(y, leaves, dout)), (wanted[0], *wanted[2:]), strict=True):
            close(one, exact, dtype)


@pytest.mark.parametrize("head_dim", [64, 72])
def test_documents_of_other_keys_than_queries(head_dim: int) -> None:
    """As in a ring: documents that only queries have, that only keys have, and of both."""
    q, k, v, dout = make(96, 160, torch.bfloat16, head_dim)
    of_queries = torch.tensor([[3] * 50 + [4] * 46, [1] * 10 + [2] * 86])
    of_keys = torch.tensor([[1] * 30 + [3] * 130, [0] * 160])
    segments = find_segments(of_queries.numpy(), of_keys.numpy(), torch.device(DEVICE))
    limits = KeyLimits(False, Docs(of_queries.to(DEVICE), of_keys.to(DEVICE), segments))
    assert find_kernel(q, k, limits).name == "flash"
    right = reference(q, k, v, dout, limits)
    total = torch.where(right[1] == float("-inf"), 0.0, right[1])  # as if other blocks had seen keys
    out, lse = attend(q, k, v, limits)
    for mine, exact in zip((out, lse), right[:2], strict=True):
        assert torch.equal(mine == float("-inf"), exact == float("-inf"))
        close(mine.nan_to_num(neginf=0.0), exact.nan_to_num(neginf=0.0), torch.bfloat16)
    for mine, exact in zip(attend_backward(dout, q, k, v, out, total, limits), right[2:], strict=True):
        close(mine, exact, torch.bfloat16)


def test_queries_without_keys() -> None:
    """A query that sees no key gives 0 and a log-sum-exp of -inf, and does not change what it is merged with."""
    q, k, v, _ = make(16, 24, torch.bfloat16)
    zeros, ones = torch.zeros(2, 16, dtype=torch.int64), torch.ones(2, 24, dtype=torch.int64)
    segments = find_segments(zeros.numpy(), ones.numpy(), torch.device(DEVICE))
    out, lse = attend(q, k, v, KeyLimits(False, Docs(zeros.to(DEVICE), ones.to(DEVICE), segments)))
    assert not out.any() and bool((lse == float("-inf")).all())
    other, other_lse = attend(q, k, v, KeyLimits(False))
    merged, total = merge(out.float(), lse, other, other_lse)
    assert torch.equal(merged, other.float()) and torch.equal(total, other_lse)


def test_blocks_merge_to_the_whole() -> None:
    q, k, v, dout = make(96, 256, torch.bfloat16)
    right = reference(q, k, v, dout, KeyLimits(False))
    out, lse = None, None
    for a in range(0, 256, 64):
        y, log = attend(q, k[:, a : a + 64], v[:, a : a + 64], KeyLimits(False))
        out, lse = (y.float(), log) if out is None or lse is None else merge(out, lse, y, log)
    assert out is not None and lse is not None
    close(out, right[0], torch.bfloat16)
    close(lse, right[1], torch.bfloat16)


WINDOWS = [
    (256, 256, KeyLimits(True, window=1)), (256, 256, KeyLimits(True, window=70)),
    (199, 199, KeyLimits(True, window=128)),
    (256, 256, KeyLimits(False, window=300, offset=256)), (256, 256, KeyLimits(False, window=40, offset=256)),
    (77, 256, KeyLimits(False, window=300, offset=256)), (77, 256, KeyLimits(False, window=9, offset=256)),
    (256, 256, KeyLimits(False, window=1000, offset=1024)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 72, 256])
def test_windows(dtype: torch.dtype, head_dim: int) -> None:
    """Sliding windows in square blocks and in blocks whose keys are before the queries."""
    for queries, keys, limits in WINDOWS:
        q, k, v, dout = make(queries, keys, dtype, head_dim)
        rows, seen = limits.seen(queries, keys)
        if dtype != torch.float32 and head_dim == 64:
            assert find_kernel(q[:, :rows], k[:, seen:], limits.starting_at(rows, seen)).name == "flash"
        out, lse = attend(q, k, v, limits)
        found = (out, lse, *attend_backward(dout, q, k, v, out, lse, limits))
        for mine, right in zip(found, reference(q, k, v, dout, limits), strict=True):
            assert torch.equal(mine == float("-inf"), right == float("-inf")), limits
            close(mine.nan_to_num(neginf=0.0), right.nan_to_num(neginf=0.0), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_whole_sequences_with_windows(dtype: torch.dtype, sinks: bool, packed: bool) -> None:
    q, k, v, dout = make(200, 200, dtype)
    ids = (torch.arange(200, device=DEVICE) // 70).expand(2, -1) if packed else None
    docs = None if ids is None else Docs(ids, ids)
    scores = torch.linspace(-1, 1, 4, device=DEVICE) if sinks else None
    rows = torch.arange(200, device=DEVICE)
    info = TokenInfo(None, ids, None, rows, 200, window=33, sinks=scores, segments=segments_of(ids))
    function = attention_with_sinks if sinks else attention
    made = []
    for kind in (dtype, torch.float32):
        leaves = [t.to(kind).requires_grad_() for t in (q, k, v)]
        if sinks:
            assert scores is not None
            leaves.append(scores.clone().requires_grad_())
            info = info._replace(sinks=leaves[-1])
        y = function(*leaves[:3], True, info)
        made.append((y, *torch.autograd.grad(y, leaves, dout.to(kind))))
    for mine, exact in zip(*made, strict=True):
        close(mine, exact, dtype)
    if not sinks:
        for mine, exact in zip(made[0][1:], reference(q, k, v, dout, KeyLimits(True, docs, 33))[2:], strict=True):
            close(mine, exact, dtype)


@pytest.mark.parametrize(("window", "packed"), [(None, False), (100, False), (None, True), (30, True)])
def test_compiled(window: int | None, packed: bool) -> None:
    """Documents of other numbers and lengths each time too."""
    q, k, v, dout = make(256, 256, torch.bfloat16)
    rows = torch.arange(256, device=DEVICE)
    compiled = torch.compile(attention, fullgraph=True)
    for mean in (70, 10, 200) if packed else (1,):
        ids = (rows // mean).expand(2, -1) if packed else None
        info = TokenInfo(None, ids, None, rows, 256, window=window, segments=segments_of(ids))
        assert_attends(compiled, (q, k, v, dout), info)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("packed", [False, True])
def test_older_gpus(monkeypatch: pytest.MonkeyPatch, window: int | None, packed: bool) -> None:
    """Those without the kernels (V100, T4) train in fp16 with torch's own."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr("weft.models.attention.flash_attention", None)
    monkeypatch.setattr("weft.models.attention.cudnn_attention", None)
    q, k, v, dout = make(130, 130, torch.float16)
    rows = torch.arange(130, device=DEVICE)
    ids = (rows // 37).expand(2, -1) if packed else None
    info = TokenInfo(None, ids, None, rows, 130, window=window, segments=segments_of(ids))
    assert_attends(attention, (q, k, v, dout), info)
