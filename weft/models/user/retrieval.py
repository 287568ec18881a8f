"""Metrics of two towers over all held-out samples: recall at 1 and zero-shot accuracy (Radford et al., 2021)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.job.train import RETRIEVAL_METRICS
from weft.models.user.contrastive import towers_of

CHUNK = 1024
"""Samples whose similarities with all others are computed at once."""


def retrieval_rows(outputs: Any, batch: dict[str, Tensor], module: str) -> Tensor:
    """A row for each sample that is not padding: its number, that of its caption, and both vectors, [samples, width].
    Without targets, every sample has a caption of its own."""
    first, second, _ = towers_of(outputs, module)
    ids, targets = batch["ids"], batch.get("targets", batch["ids"])
    valid = batch["valid"].flatten(1).any(1) if batch["valid"].dim() > 1 else batch["valid"]
    captions = targets if targets.dim() == 1 and not targets.is_floating_point() else ids
    vectors = [F.normalize(x.detach().double(), dim=-1) for x in (first, second)]
    rows = torch.cat([ids[:, None].double(), captions[:, None].double(), *vectors], dim=1)
    return rows[(ids >= 0) & valid]


def retrieval_figures(rows: Tensor, names: Collection[str]) -> dict[str, float]:
    """The figures of the metrics among `names`, from the rows of all ranks.

    recall_at_1: the share of first vectors (images) whose nearest second vector has their caption, the same of second
    vectors (texts), and the mean of both. zero_shot: the share of first vectors whose nearest caption, among all
    distinct ones, is theirs.
    """
    wanted = [name for name in RETRIEVAL_METRICS if name in names]
    if not wanted:
        return {}
    numbers = rows[:, 0].tolist()
    place = {number: i for i, number in reversed(list(enumerate(numbers)))}  # ranks of tp have the same rows
    rows = rows[sorted(place.values())]
    if not len(rows):
        return dict.fromkeys((f"val_{name}" for name in wanted), 0.0)
    captions = rows[:, 1]
    first, second = rows[:, 2:].chunk(2, dim=1)
    out: dict[str, float] = {}
    if "recall_at_1" in wanted:
        there, back = _hits(first, captions, second, captions), _hits(second, captions, first, captions)
        out = {"val_recall_at_1": (there + back) / 2, "val_recall_at_1_image": there, "val_recall_at_1_text": back}
    if "zero_shot" in wanted:
        distinct, of = torch.unique(captions, return_inverse=True)
        sums = second.new_zeros(len(distinct), second.shape[1]).index_add(0, of, second)
        out["val_zero_shot"] = _hits(first, captions, F.normalize(sums, dim=-1), distinct)
    return out


def _hits(queries: Tensor, wanted: Tensor, candidates: Tensor, captions: Tensor) -> float:
    """The share of queries whose nearest candidate has the wanted caption."""
    hits = 0
    for part, right in zip(queries.split(CHUNK), wanted.split(CHUNK), strict=True):
        hits += int((captions[(part @ candidates.T).argmax(1)] == right).sum())
    return hits / len(queries)
