"""Private torch names behind the models: attention kernels, fp8 and grouped products, the autograd engine."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

# torch's public attention function returns no log-sum-exp and chooses the kernel itself
cudnn_attention: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
flash_attention: Any = torch.ops.aten._flash_attention_forward
flash_attention_backward: Any = torch.ops.aten._flash_attention_backward


def fp8_mm(a: Tensor, b: Tensor, unscale_a: Tensor, unscale_b: Tensor, out: torch.dtype, fast: bool) -> Tensor:
    """a [m, k] · b [k, n] of fp8 factors on CUDA; `a` is stored by rows and `b` by columns."""
    return torch._scaled_mm(a, b, unscale_a, unscale_b, out_dtype=out, use_fast_accum=fast)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows up to ends[0] by weight[0], from there to ends[1] by weight[1], and so on."""
    return torch._grouped_mm(x, weight, offs=ends)


def gradient_is_needed(node: Any, index: int) -> bool:
    """Whether the running backward pass uses the gradient of a node's input; a split one asks for one at a time."""
    following = node.next_functions[index][0]
    try:
        return following is not None and torch._C._will_engine_execute_node(following)
    except RuntimeError:  # not known for a leaf under autograd.grad()
        return True


def hash_triton() -> None:
    """Compute the hash of Triton's own files, part of the cache key of every kernel: half a second, once a process."""
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def allow_variants(count: int) -> None:
    """Let torch.compile keep this many variants of a function, such as the blocks of a ResNet with other shapes."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, count)


def import_compiler() -> None:
    """Import what torch.compile imports when a model is compiled, which takes seconds: a spare does it while it waits.
    Not before the fork, because it may start threads."""
    import_module("torch._inductor.compile_fx")
