"""The class of work of a kernel or an operator, and its FLOPs and bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache

from weft.watch.profiler_trace import TraceEvent

CLASSES = (
    "matmul", "attention", "loss", "optimizer", "communication", "elementwise", "data/host", "idle",
)  # fmt: skip
"""Classes of work in a step, in the order of the report."""

_OWN = r"^(?!triton_(poi|per|red|for|mix)_).*"
"""Excludes kernels fused by the compiler, whose names list everything in them, products and attention included."""

_RULES: tuple[tuple[str, str, str], ...] = (
    ("communication", "name", r"nccl|rccl|nvshmem|symm_mem|^gloo:|^c10d::(?!functional)|one_shot_all|two_shot_all"),
    ("optimizer", "stack", r"^weft\.update$"),
    ("attention", "stack", r"^aten::_?scaled_dot_product|ScaledDotProduct|^aten::_(flash|efficient|cudnn)_attention"),
    ("attention", "name", _OWN + r"(flash|fmha|sdpa|attention|attn|cudnn::fusion|compute_dot_do_o)"),
    ("matmul", "name", _OWN + r"(gemm|gemv|nvjet|cutlass|xmma|cublas|wgmma|splitKreduce|triton_tem|_mm_|Cijk)"),
    (
        "matmul",
        "stack",
        r"^aten::(mm|addmm_?|bmm|baddbmm_?|_scaled_mm|_grouped_mm|_scaled_grouped_mm|mv|dot)$|mkl(dnn)?_lin",
    ),
    ("loss", "name", r"weft_cross_entropy|cross_entropy|nll_loss|log_softmax"),
    ("loss", "stack", r"^weft\.loss$|cross_entropy|nll_loss|log_softmax|mse_loss|NllLoss|LogSoftmax|MseLoss"),
    ("optimizer", "name", r"^weft_(adam|clip|sgd|muon)|fused_adam|FusedAdam|FusedSgd"),
    ("optimizer", "stack", r"AccumulateGrad|^Optimizer\.step|^aten::_fused_(adam|sgd)"),
    ("communication", "stack", r"^FSDP::|^c10d::|^_c10d_functional|^nccl:|^gloo:|^record_param_comms"),
    ("data/host", "name", r"Memcpy (HtoD|DtoH)|^aten::(item|_local_scalar_dense)$"),
    ("data/host", "stack", r"^weft\.(data|figures)$"),
)
"""Class, field and pattern; the first match decides, and without a match the class is elementwise.

`name` is the kernel's own name (on a CPU the operator's); `stack` is any name of the operators and ranges that it was
launched from. A product inside attention is attention, and everything in the update is the optimizer."""

RULES = tuple((label, where, re.compile(pattern)) for label, where, pattern in _RULES)

HOST = re.compile(
    r"^autograd::|Backward\d*$|^weft\.|^Optimizer|^Pregraph|^TorchDynamo|^aten::(item|_local_scalar|empty)"
)
"""On a CPU, names whose own time is spent in Python and the autograd engine, not in an operator."""

VIEWS = re.compile(
    r"^aten::(view|_unsafe_view|t|transpose|as_strided|expand|permute|reshape|unsqueeze|squeeze|detach|detach_|slice|"
    r"select|alias|narrow|split|chunk|unbind|empty\w*|new_empty\w*|resize_|item|_local_scalar_dense|is_\w+|resolve_\w+|"
    r"result_type|lift_fresh|set_|contiguous|to|zeros\w*|ones\w*)$"
)
"""Operators that move no data: views, allocations, and wrappers around another operator."""

SIZES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "short": 2,
    "bool": 1, "unsigned char": 1, "signed char": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element, by the profiler's type names."""

PRODUCTS = {
    "aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2), "aten::_scaled_mm": (0, 1),
}  # fmt: skip
"""The two factors among an operator's arguments."""

FP8_PRODUCT = "aten::_scaled_mm"
"""The operator that multiplies fp8 matrices."""


@cache
def _fits(name: str, where: str) -> int:
    """The rules that match a name, as bits; cached because a trace repeats few names very often."""
    return sum(1 << i for i, (_, at, pattern) in enumerate(RULES) if at == where and pattern.search(name))


def classify(name: str, stack: Sequence[str]) -> str:
    """The class of a kernel (on a CPU, of an operator), from its name and its launch stack."""
    found = _fits(name, "name")
    for each in stack:
        found |= _fits(each, "stack")
    return RULES[(found & -found).bit_length() - 1][0] if found else "elementwise"


def product_flops(op: TraceEvent) -> float:
    """FLOPs of a matrix product from its shapes; 0 for other operators."""
    places = PRODUCTS.get(op.name)
    if places is None or len(op.dims) <= max(places):
        return 0.0
    left, right = (op.dims[i] for i in places)
    return 2.0 * math.prod(left) * right[-1] if len(left) >= 2 and len(right) >= 2 else 0.0


ATTENTION = re.compile(r"^aten::_scaled_dot_product_\w*attention(_for_cpu)?(_backward)?$")


def attention_flops(op: TraceEvent, causal: bool) -> float:
    """FLOPs that an attention operator computes: two products forward, five backward, half if causal."""
    found = ATTENTION.match(op.name)
    shapes = [d for d in op.dims if len(d) == 4]
    backward = bool(found and found.group(2))
    if not found or len(shapes) < 3:
        return 0.0
    query, key = shapes[1:3] if backward else shapes[:2]  # [batch, heads, seq, head]; backward has the gradient first
    one = 2.0 * math.prod(query) * key[2]
    return one * (5 if backward else 2) * (0.5 if causal else 1.0)


def moved_bytes(op: TraceEvent) -> float:
    """Estimated bytes that an element-wise operator reads and writes: its arguments, and one more for its result.

    A compiled kernel has its outputs among its arguments; an in-place operator writes an argument.
    """
    if VIEWS.match(op.name):
        return 0.0
    sizes = [math.prod(d) * SIZES[t] for d, t in zip(op.dims, op.types, strict=True) if d and t in SIZES]
    if not sizes:
        return 0.0
    return float(sum(sizes) + (0 if op.name.startswith("triton_") else max(sizes)))
