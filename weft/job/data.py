"""`data`: where samples come from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from weft.job.section import Section
from weft.job.token_files import MASK


class MixtureSource(Section):
    """One source of a mixture."""

    source: str
    """As data.source."""
    weight: float = Field(1.0, ge=0, le=1e9)
    """Share of the samples, relative to the other weights."""
    final_weight: float | None = Field(None, ge=0, le=1e9)
    """Weight at the end of the run, towards which it changes from data.anneal_from on. Default: weight."""
    format: Literal["text", "chat", "instruction"] | None = None
    """As data.format. Default: that."""


class Data(Section):
    """Where samples come from, and how they are tokenized and masked."""

    source: str = "pydoc"
    """pydoc (Python's reference documentation), stdlib (Python's source code), docstrings (questions about Python's
    functions, with answers), synthetic, the path of a token store made by `weft data build`, a file or folder of
    data.format, or your own dataset as package.module:name."""
    format: Literal["text", "chat", "instruction"] | None = None
    """What the files at data.source hold: text, conversations (chat), or questions with answers (instruction). Then it
    may be a JSONL, parquet or arrow file or a folder, which is tokenized once. Default: data.source is no such file."""
    template: str | None = None
    """Chat template of chat and instruction: chatml, plain, or the path of a .jinja file. Default: the tokenizer's."""
    answers_only: bool = True
    """Train only on the tokens of answers, of chat and instruction."""
    packing: bool = True
    """Put several conversations into a sample, without attention between them; false: one a sample."""
    field: str = "text"
    """Field of a record with the text, of format text."""
    mixture: tuple[MixtureSource, ...] = ()
    """Several sources with weights, instead of data.source."""
    anneal_from: float = Field(1.0, ge=0, le=1)
    """Share of the run's samples after which the weights of the mixture change to their final_weight."""
    shuffle: Literal["samples", "blocks", "none"] = "samples"
    """Shuffle samples one by one, or blocks of data.shuffle_block neighbours and the samples in each, or do not."""
    shuffle_block: int = Field(1024, ge=1, le=2**31)
    """Samples of a block (shuffle: blocks)."""
    seq_len: int = Field(128, ge=1, le=2**31)
    """Sequence length: tokens per sample."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json. A token store has its own tokenizer."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of the corpus, at its end, held out for evaluation."""
    mask_documents: bool = False
    """Mask attention between packed documents: positions restart in each, and no token predicts the next document."""
    prefetch: int = Field(2, ge=0, le=1000)
    """Batches to read ahead in the background."""
    record_ids: bool = False
    """Log the samples that each rank reads at each step to samples/rank-*.jsonl."""

    @property
    def separates_documents(self) -> bool:
        """Whether attention is masked between documents: by mask_documents, or in packed conversations."""
        sources = [(s.source, s.format or self.format) for s in self.mixture] or [(self.source, self.format)]
        return self.mask_documents or any(
            format in ("chat", "instruction") or source == "docstrings" or (Path(source) / MASK).is_file()
            for source, format in sources
        )

    @model_validator(mode="after")
    def _check_mixture(self) -> Data:
        for name, weights in (
            ("weight", [s.weight for s in self.mixture]),
            ("final_weight", [s.weight if s.final_weight is None else s.final_weight for s in self.mixture]),
        ):
            if self.mixture and not sum(weights) > 0:
                raise ValueError(f"must have a source in mixture with a {name} above 0")
        if self.anneal_from == 1 and any(s.final_weight is not None for s in self.mixture):
            raise ValueError("must set anneal_from, such as 0.8, for the final_weight of its mixture")
        return self
