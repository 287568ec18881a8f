"""The private torch names of weft/models/kernel_internals.py still exist and take the arguments that Weft gives."""

from __future__ import annotations

import torch

from weft.models import kernel_internals as internals

ARGUMENTS = {
    "cudnn_attention": 8, "cudnn_attention_backward": 15, "flash_attention": 10, "flash_attention_backward": 14,
}  # fmt: skip


def test_attention_operators_take_as_many_arguments() -> None:
    for name, count in ARGUMENTS.items():
        schema = getattr(internals, name).default._schema
        assert len(schema.arguments) >= count, f"torch changed {schema.name}: adapt weft/models/attention_kernels.py"


def test_flash_takes_windows() -> None:
    for name in ("flash_attention", "flash_attention_backward"):
        names = {a.name for a in getattr(internals, name).default._schema.arguments}
        assert {"scale", "window_size_left", "window_size_right"} <= names, "adapt weft/models/attention_kernels.py"


def test_products_exist() -> None:
    for name in ("_scaled_mm", "_grouped_mm"):
        assert hasattr(torch, name), f"torch moved torch.{name}: adapt weft/models/kernel_internals.py"


def test_hash_of_triton_is_kept() -> None:
    from triton.runtime.cache import triton_key  # if this fails, adapt weft/models/kernel_internals.py

    internals.hash_triton()
    assert triton_key.cache_info().currsize == 1


def test_needed_gradients_are_known() -> None:
    found: list[bool] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found.extend(internals.gradient_is_needed(ctx, i) for i in range(2))
            return grads[0], grads[0]

    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    inner = a * 2
    (grad,) = torch.autograd.grad(Twice.apply(inner, b * 2), [inner])
    assert grad.item() == 1 and found[1] is False, "torch changed which nodes a backward pass reports as needed"


def test_variants_of_compiled_functions_can_be_allowed() -> None:
    import torch._dynamo.config as config  # if this fails, adapt weft/models/kernel_internals.py

    before = config.recompile_limit
    internals.allow_variants(before + 1)
    assert config.recompile_limit == before + 1
    config.recompile_limit = before
