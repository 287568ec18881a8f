"""The chunked loss: products with a padded vocabulary, and what is held at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.models.loss import HeadProducts, HeadProductsFactory, PaddedHeadProducts, linear_cross_entropy

TOKENS, DIM, VOCAB = 50, 24, 101


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("rows", [7, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_vocabulary(dtype: torch.dtype, rows: int, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are those of the vocabulary without padding."""
    monkeypatch.setattr("weft.models.loss.LOGITS_BYTES", {"cpu": rows * VOCAB * 4, "cuda": 0})
    make = torch.Generator().manual_seed(3)
    leaves = [torch.randn(*shape, generator=make).to(dtype) for shape in ((TOKENS, DIM), (VOCAB, DIM), (VOCAB,))]
    x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    targets = torch.rand(TOKENS, VOCAB, generator=make) if mixed else torch.arange(TOKENS) * 2 + 1
    valid = torch.arange(TOKENS) % 5 > 0

    def go(products: HeadProductsFactory) -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x, weight, targets, valid, 0.1, products=products, bias=bias)
        return loss, *torch.autograd.grad(loss, [x, weight, bias])

    for mine, right in zip(go(PaddedHeadProducts), go(HeadProducts), strict=True):
        torch.testing.assert_close(mine, right)
