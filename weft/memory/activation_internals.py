"""Private torch name behind activations in fp8: the version of a tensor's values."""

from __future__ import annotations

from torch import Tensor


def value_version(x: Tensor) -> int:
    """A number that grows with every in-place change of the tensor."""
    version: int = x._version
    return version
