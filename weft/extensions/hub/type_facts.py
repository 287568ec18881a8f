"""What a type of transformers allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TypeFacts:
    """What a type of transformers allows."""

    name: str
    """Its model_type."""
    no_tp: str | None
    """Why tensor parallelism is not possible."""
    no_pp: str | None
    no_cp: str | None
    no_docs: str | None
    """Why tokens of several documents cannot be kept apart."""
