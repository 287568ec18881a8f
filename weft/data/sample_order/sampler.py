"""Which sample is the k-th of a run: a pure function of the seed and k, in constant memory."""

from __future__ import annotations

import hashlib
from typing import overload

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]


@overload
def shuffle(seed: int, epoch: int, index: int, n: int) -> int: ...
@overload
def shuffle(seed: int, epoch: int, index: Ints, n: int) -> Ints: ...
def shuffle(seed: int, epoch: int, index: int | Ints, n: int) -> int | Ints:
    """Where `index` goes when range(n) is shuffled for this seed and epoch: a bijection of range(n).

    No table of n numbers is made, so a rank that joins at any step needs neither memory nor the steps before it.
    """
    _check_length(n)
    flat = _integers(index)
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= n):
        raise ValueError(f"an index of a shuffle of {n} must lie in range({n}), not {index!r}")
    keys = _round_keys(seed, epoch)[:, None]
    moved = _walk(flat.astype(np.uint64), np.broadcast_to(keys, (_ROUNDS, flat.size)), n).astype(np.int64)
    return moved.reshape(index.shape) if isinstance(index, np.ndarray) else int(moved[0])


@overload
def sample_index(seed: int, k: int, n: int, read: int | None = None) -> int: ...
@overload
def sample_index(seed: int, k: Ints, n: int, read: int | None = None) -> Ints: ...
def sample_index(seed: int, k: int | Ints, n: int, read: int | None = None) -> int | Ints:
    """The dataset index of the run's k-th sample when an epoch has n: every epoch is its own shuffle of range(n), of
    which the first `read` are read (default: all)."""
    read = n if read is None else read
    _check_length(n)
    flat = _integers(k)
    if flat.size and int(flat.min()) < 0:
        raise ValueError(f"samples are counted from 0, not {k!r}")
    epochs, which = np.unique(flat // read, return_inverse=True)
    table = np.stack([_round_keys(seed, int(e)) for e in epochs], axis=1) if epochs.size else _round_keys(0, 0)[:, None]
    moved = _walk((flat % read).astype(np.uint64), table[:, which.reshape(-1)], n).astype(np.int64)
    return moved.reshape(k.shape) if isinstance(k, np.ndarray) else int(moved[0])


def _check_length(n: int) -> None:
    if not 1 <= n < 1 << 62:
        raise ValueError(f"a shuffle needs between 1 and 2**62 samples, not {n}")


def _integers(value: int | Ints) -> Ints:
    return np.asarray(value).reshape(-1).astype(np.int64)


def _round_keys(seed: int, epoch: int) -> _Words:
    """Eight keys from a hash, so that neighbouring seeds and epochs share nothing, and a seed may be of any size."""
    digest = hashlib.blake2b(f"weft shuffle {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _walk(x: _Words, keys: _Words, n: int) -> _Words:
    """Cycle walking: a permutation of a power of four, applied until the value falls below n, permutes range(n).

    The power of four is less than four times n, so a value walks four steps on average at the most.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    x = _feistel(x, keys, half)
    outside = np.flatnonzero(x >= np.uint64(n))
    while outside.size:
        x[outside] = _feistel(x[outside], keys[:, outside], half)
        outside = outside[x[outside] >= np.uint64(n)]
    return x


def _feistel(x: _Words, keys: _Words, half: int) -> _Words:
    """A balanced Feistel network over 2 × half bits: a bijection whatever the round function is."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: _Words) -> _Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
