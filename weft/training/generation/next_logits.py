"""Logits of the token after each of several texts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

import torch
from torch import Tensor, nn

from weft.models.key_value_cache import KeyValueCache

DROPPED_SHARE = 0.25
"""Of the window, the oldest tokens that a text leaves behind when it exceeds the window. One at a time would change the
positions of all others each time, so each new token would take as long as a whole window."""


class NextLogits:
    """Logits of the token after each text, from as many of its last tokens as the window holds. Earlier tokens are
    computed once, and again where a text drops its oldest ones."""

    def __init__(self, model: nn.Module, window: int):
        self.model, self.window, self.dropped = model, window, max(1, int(window * DROPPED_SHARE))
        self.cache: KeyValueCache | None = None
        self.first: dict[int, int] = {}
        """By number, the texts in the cache and the first of their tokens there."""
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def first_of(self, length: int) -> int:
        """The first token that is read of a text of this length."""
        return max(0, -(-(length - self.window) // self.dropped)) * self.dropped

    def __call__(self, texts: dict[int, list[int]]) -> Tensor:
        """Logits [texts, vocab] of the token after each text, by its number; a text is as before with one token more,
        or new in the first call."""
        first = {i: self.first_of(len(ids)) for i, ids in texts.items()}
        rows = [ids[first[i] :] for i, ids in texts.items()]
        longest = max(map(len, rows))
        if not KeyValueCache.applies_to(self.model):
            return whole_logits(self.model, rows, longest)
        if self.cache is None or any(self.first[i] != first[i] for i in texts):
            self.stack.close()
            pads = torch.tensor([longest - len(row) for row in rows])
            self.cache, self.first = self.stack.enter_context(KeyValueCache(self.model, pads)), first
            return self.cache.logits(_padded(rows, longest))
        if self.first != first:
            held = list(self.first)
            self.cache.keep([held.index(i) for i in texts])
            self.first = first
        return self.cache.logits(torch.tensor([row[-1:] for row in rows]))


def _padded(rows: list[list[int]], longest: int) -> Tensor:
    return torch.tensor([[0] * (longest - len(row)) + row for row in rows])


def whole_logits(model: nn.Module, rows: list[list[int]], longest: int) -> Tensor:
    """Logits of the token after each row [rows, vocab]; shorter rows are padded at their beginning."""
    pads = torch.tensor([longest - len(row) for row in rows])
    inputs = _padded(rows, longest)
    if not pads.any():
        return model(inputs)[:, -1].float()
    place = torch.arange(longest) - pads.unsqueeze(1)
    return model(inputs, docs=(place >= 0).long(), positions=place.clamp(min=0))[:, -1].float()
