"""Backends: the libraries that carry tensors between ranks (`comm.backend`)."""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.registry import Registry


@dataclass(frozen=True)
class Backend:
    """A communication backend. Functions are named as `module:function`."""

    name: str
    torch_name: str
    """Its name in torch, with the device types of several."""
    devices: tuple[str, ...]
    """Kinds of devices whose tensors it carries."""
    host: str
    """torch's name of the backend that carries small values in host memory between steps."""
    other: str = "gloo"
    """The backend that a refusal names instead."""
    encrypts: bool = False
    """Whether comm.encrypt works with it."""
    launcher: str = ""
    """The command that has to start its ranks; empty if any may."""
    register: str = ""
    """Registers it with torch, once per process."""
    meet: str = ""
    """Gives the store at which ranks of its launcher meet, from the timeout."""


BACKENDS: Registry[Backend] = Registry("comm.backend", __name__)
BACKENDS.register(Backend("gloo", "gloo", ("cpu", "cuda"), "gloo", encrypts=True))
BACKENDS.register(Backend("nccl", "cpu:gloo,cuda:nccl", ("cuda",), "gloo"))
