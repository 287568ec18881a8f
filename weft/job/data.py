"""`data`: where samples come from."""

from __future__ import annotations

from pydantic import Field

from weft.job.section import Section


class Data(Section):
    """Where samples come from, and how they are tokenized and masked."""

    source: str = "pydoc"
    """pydoc (Python's reference documentation), stdlib (Python's source code), synthetic, the path of a token store
    made by `weft data build`, or your own dataset as package.module:name."""
    seq_len: int = Field(128, ge=1, le=2**31)
    """Sequence length: tokens per sample."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json. A token store has its own tokenizer."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of the corpus, at its end, held out for evaluation."""
    mask_documents: bool = False
    """Mask attention between packed documents: positions restart in each, and no token predicts the next document."""
    drop_last: bool = False
    """End an epoch with its last whole batch: the samples after it are left out, others in each epoch. By default a
    batch continues with the next epoch, so that every sample is read once an epoch."""
    prefetch: int = Field(2, ge=0, le=1000)
    """Batches to read ahead in the background."""
    record_ids: bool = False
    """Log the samples that each rank reads at each step to samples/rank-*.jsonl."""
