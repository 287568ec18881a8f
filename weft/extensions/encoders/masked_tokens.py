"""Masked language modelling (Devlin et al. 2018, §3.1): some tokens of a sample are hidden, and are its targets."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from weft.data.sample_order import Ints
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.job.shapes import data_mask_token, data_vocab

MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Shares of the chosen tokens that become the mask token, or a random token; the others stay."""


class MaskedTokens:
    """Samples of a text dataset with a share of their tokens hidden. Which ones is a function of the seed, the sample
    and the epoch; held-out samples are always the same."""

    takes_epoch = True

    def __init__(self, inner: Any, *, seed: int, rate: float, vocab: int, mask_token: int) -> None:
        self._inner, self._seed, self._rate, self._vocab, self._token = inner, seed, rate, vocab, mask_token
        self.train_len, self.val_len = inner.train_len, inner.val_len
        self.fingerprint = str(getattr(inner, "fingerprint", ""))
        for name in ("sample_indices", "val_ranges", "summary"):
            if (own := getattr(inner, name, None)) is not None:
                setattr(self, name, own)

    def train(self, index: int, epoch: int = 0) -> dict[str, np.ndarray]:
        return self._masked(self._inner.train(index), f"{index} {epoch}")

    def val(self, index: int) -> dict[str, np.ndarray]:
        return self._masked(self._inner.val(index), f"val {index}")

    def _masked(self, sample: dict[str, np.ndarray], number: str) -> dict[str, np.ndarray]:
        key = hashlib.blake2b(f"weft mask {self._seed} {number}".encode(), digest_size=16).digest()
        random = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))
        tokens, following = sample["inputs"], np.flatnonzero(sample["valid"])
        real = min(tokens.size, int(following[-1]) + 2) if following.size else 1  # padding has no token that follows
        chosen: Ints = random.permutation(real)[: max(1, round(self._rate * real))]
        draw = random.random(chosen.size)
        inputs = tokens.copy()
        inputs[chosen] = np.where(
            draw < MASKED_SHARE,
            self._token,
            np.where(draw < MASKED_SHARE + RANDOM_SHARE, random.integers(0, self._vocab, chosen.size), tokens[chosen]),
        )
        valid = np.zeros(tokens.size, dtype=np.bool_)
        valid[chosen] = True
        return {**sample, "inputs": inputs, "targets": tokens, "valid": valid}


def with_hidden_tokens(job: Job, inner: Any) -> Any:
    """The samples of a masked language model from those of a text dataset; labelled texts stay as they are."""
    if job.model.classes:
        return inner
    vocab, token, known = job.model.vocab or 0, data_mask_token(job.data), data_vocab(job.data)
    if token is None:
        token = vocab - 1
        if known is not None and token < known:
            raise JobError(
                f"model.family={job.model.family} hides tokens, and the tokenizer of data.source {job.data.source} has "
                f"no mask token; write model.vocab={known + 1}, or data.mask_token"
            )
    if token >= vocab:
        raise JobError(f"data.mask_token={token} is outside of model.vocab={vocab}; write model.vocab={token + 1}")
    return MaskedTokens(inner, seed=job.train.seed, rate=job.data.mask_rate, vocab=vocab, mask_token=token)
