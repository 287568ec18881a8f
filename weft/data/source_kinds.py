"""The kinds of data.source, one entry each. What none reads is a user's dataset, a corpus, a token store or text."""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.registry import Registry


@dataclass(frozen=True)
class SourceKind:
    """A kind of data.source. Functions are named as `module:function`."""

    name: str
    reads: str
    """From a job to whether its source is of this kind."""
    open: str
    """From a job to its dataset."""
    sources: tuple[str, ...] = ()
    """Values of data.source that name one."""
    is_local: str = ""
    """From such a value to whether it is on this machine, else it is downloaded."""


SOURCES: Registry[SourceKind] = Registry("data.source", __name__)

SOURCES.register(
    SourceKind("synthetic", "weft.data.synthetic:reads_noise", "weft.data.synthetic:open_synthetic", ("synthetic",))
)
