"""Documents packed into a sequence: tokens attend within theirs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.comm.fake_internals import is_fake

Ids = NDArray[np.int64]


class Segments(NamedTuple):
    """Documents as GPU kernels take them, all samples of the batch one after another: the queries of a segment attend
    to its keys."""

    queries: Tensor
    """Where each begins, and the end of the last; in int32."""
    keys: Tensor
    most_queries: int
    """At least those of the longest."""
    most_keys: int


class Docs(NamedTuple):
    """Documents of a block of queries and keys."""

    queries: Tensor
    """The ids of their documents [batch, queries]."""
    keys: Tensor
    segments: Segments | None = None
    """None where a mask is needed."""


def document_mask(of_queries: Tensor, of_keys: Tensor, causal: bool) -> Tensor:
    """True where a token may attend: within its document, and not ahead if causal. [batch, 1, queries, keys]"""
    same = of_queries.unsqueeze(2) == of_keys.unsqueeze(1)
    return (same.tril() if causal else same).unsqueeze(1)


def ids_on_host(docs: Tensor) -> Ids | None:
    """The ids of documents on a GPU, for which the host waits; None for fake tensors and those on a CPU."""
    return docs.cpu().numpy() if docs.is_cuda and not is_fake(docs) else None


def segments_of(docs: Tensor) -> Segments | None:
    """Segments of whole sequences."""
    ids = ids_on_host(docs)
    return find_segments(ids, ids, docs.device)


def find_segments(queries: Ids | None, keys: Ids | None, device: torch.device) -> Segments | None:
    """Segments of documents [batch, tokens]; None if they are not known or not in order."""
    if queries is None or keys is None or any((np.diff(ids, axis=1) < 0).any() for ids in (queries, keys)):
        return None
    lengths = np.concatenate([_lengths(*rows) for rows in zip(queries, keys, strict=True)], 1)
    # rounded, with empty segments at the end: few variants for a compiler
    begins = np.zeros((2, 1 + _rounded(lengths.shape[1])), dtype=np.int32)
    begins[:, 1:] = lengths.sum(1, keepdims=True)
    begins[:, 1 : 1 + lengths.shape[1]] = lengths.cumsum(1)
    on_device = torch.from_numpy(begins).to(device)
    return Segments(on_device[0], on_device[1], *(_rounded(int(n)) for n in lengths.max(1)))


def _lengths(queries: Ids, keys: Ids) -> NDArray[np.int64]:
    """Queries and keys of each document that has any, [2, documents]."""
    ids = np.union1d(queries, keys)
    return np.stack([np.searchsorted(of, ids, "right") - np.searchsorted(of, ids, "left") for of in (queries, keys)])


def _rounded(number: int) -> int:
    """The power of two that is no less."""
    return 1 << max(number - 1, 0).bit_length()
