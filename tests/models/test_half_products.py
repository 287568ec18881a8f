"""Products of bf16 and fp16 on processors without instructions for them: fp32 products, rounded once."""

from __future__ import annotations

from pathlib import Path

from helpers.command import python

CHECK = """
import torch
from torch.nn import functional as F
from weft.half_products_internals import multiply_halves_in_fp32

torch.set_num_threads(1)
torch.backends.mkldnn.enabled = False


def outputs(dtype):
    torch.manual_seed(0)
    a, w, b = (torch.randn(shape, dtype=dtype) for shape in ((24, 16), (8, 16), (8,)))
    x, kernel = torch.randn(2, 3, 6, 6, dtype=dtype), torch.randn(4, 3, 3, 3, dtype=dtype)
    q, k, v = torch.randn(3, 2, 2, 12, 16, dtype=dtype)
    leaves = [t.requires_grad_() for t in (a, w, b, x, kernel, q, k, v)]
    stacks = a.view(2, 12, 16)
    out = [
        a @ w.T, F.linear(a, w, b), stacks @ stacks.mT, torch.baddbmm(b[0], stacks, stacks.mT, beta=0.5, alpha=2.0),
        F.scaled_dot_product_attention(q, k, v, is_causal=True), F.conv2d(x, kernel, b[:4]),
    ]
    sum((o.float() ** 2).sum() for o in out).backward()
    return [t.detach() for t in out] + [t.grad for t in leaves], leaves


before = {dtype: outputs(dtype)[0] for dtype in (torch.float32, torch.bfloat16, torch.float16)}
library = multiply_halves_in_fp32()
assert multiply_halves_in_fp32() is library
for dtype, old in before.items():
    new, (a, w, b, x, kernel, q, k, v) = outputs(dtype)
    assert all(t.dtype == dtype for t in new)
    if dtype == torch.float32:
        assert all(map(torch.equal, old, new))
        continue
    apart = [((n.float() - o.float()).norm() / o.float().norm()).item() for o, n in zip(old, new)]
    assert max(apart) < 0.02, apart  # torch's own are rounded between the products of attention
    wide = [t.detach().float() for t in (a, w, b)]
    assert torch.equal(new[0], (wide[0] @ wide[1].T).to(dtype))
    assert torch.equal(new[1], F.linear(*wide).to(dtype))
    assert torch.equal(new[5], F.conv2d(x.detach().float(), kernel.detach().float(), wide[2][:4]).to(dtype))
print("same")
"""


def test_products_are_those_of_fp32_rounded_once(tmp_path: Path) -> None:
    """In a process of its own: kernels are replaced for all of a process. A missing name of torch fails here too."""
    done = python(tmp_path, "-c", CHECK)
    assert (done.out, done.err) == ("same\n", "")
