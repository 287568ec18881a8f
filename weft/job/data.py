"""`data`: what a model is trained on."""

from __future__ import annotations

from pydantic import Field

from weft.job.section import Section


class Data(Section):
    """Where samples come from."""

    source: str = "pydoc"
    """pydoc (Python's own reference text), stdlib (its source code), synthetic, the path of a store made by
    `weft data build`, or your own dataset as package.module:name."""
    seq_len: int = Field(128, ge=1)
    """Tokens in a sample."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json. A built store brings its own."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the corpus, at its end, kept for evaluation."""
    mask_documents: bool = False
    """Packed documents do not see one another, positions restart in each, and no token predicts the next document."""
    prefetch: int = Field(2, ge=0)
    """Steps read ahead of the one being computed."""
    record_ids: bool = False
    """Write which samples each rank read at each step to samples/rank-*.jsonl."""
