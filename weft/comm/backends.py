"""Backends of collectives. Extensions register theirs; a plan reads the entries without torch."""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.registry import Registry


@dataclass(frozen=True)
class BackendKind:
    """A backend that carries tensors between ranks."""

    name: str
    """As in comm.backend."""
    tensors: str
    """Its name in torch."""
    values: str
    """The backend in torch of small values between steps."""
    register: str = ""
    """`module:function` that registers it with torch, if it is not one of torch's own."""
    meet: str = ""
    """`module:function` from a timeout to the store at which ranks meet that its launcher has started."""


BACKENDS: Registry[BackendKind] = Registry("comm.backend", __name__)

for entry in (BackendKind("nccl", "cpu:gloo,cuda:nccl", "gloo"), BackendKind("gloo", "gloo", "gloo")):
    BACKENDS.register(entry)
