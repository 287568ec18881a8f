"""Errors of a rank: the user's line, and what an index beyond an embedding means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.job.errors import JobError
from weft.job.schema import Model
from weft.models.build_model import loss_sum
from weft.training.error_text import where_raised


class FewPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.positions(torch.arange(tokens.shape[1])).expand(len(tokens), -1, -1))


def fail(length: int, width: int = 4) -> BaseException:
    module = FewPositions()
    module.head = nn.Linear(width, 8)
    inputs = torch.zeros(2, length, dtype=torch.long)
    batch = {"inputs": inputs, "targets": inputs, "valid": inputs == 0, "ids": torch.arange(2)}
    with pytest.raises((JobError, RuntimeError)) as caught:
        loss_sum(module, batch, Model(module="helpers.own_models:Plain"))
    return caught.value


def test_an_error_inside_torch_names_the_users_line() -> None:
    assert where_raised(fail(8, width=5)).startswith("test_error_text.py:")
    assert where_raised(fail(8, width=5)).endswith(" in forward")


def test_sequences_beyond_an_embedding_of_positions() -> None:
    text = str(fail(64))
    assert "an embedding of 16 rows was asked for row 63: if it holds positions, data.seq_len=16 would fit" in text
