"""`data`: where samples come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from weft.job.data_files.token_files import MASK
from weft.job.files.run_name import NAME_PATTERN
from weft.job.model_parts.loss_settings import NamedLoss
from weft.job.section import Section


@dataclass(frozen=True)
class SamplesUnchanged:
    """Marks a field of `data` that has no influence on which sample is the k-th, nor on what it holds."""


PAD_MULTIPLE = 8
"""Lengths of padded batches are multiples of this, or data.seq_len."""


class MixtureSource(Section):
    """One source of a mixture. With a name it is a task, which has its own loss and metrics."""

    source: str
    """As data.source."""
    name: str | None = Field(None, pattern=NAME_PATTERN)
    """Name of the task: steps record its loss as loss/NAME, evaluations as val_loss/NAME. Give every source one, or
    none."""
    loss: NamedLoss | None = None
    """Loss of the task: of your own module a function, output and target as in model.loss; of other models its weight
    alone, such as {weight: 0.5}. Default: model.loss."""
    weight: float = Field(1.0, ge=0, le=1e9)
    """Share of the samples, relative to the other weights."""
    final_weight: float | None = Field(None, ge=0, le=1e9)
    """Weight at the end of the run, towards which it changes from data.anneal_from on. Default: weight."""
    format: Literal["text", "chat", "instruction"] | None = None
    """As data.format. Default: that."""


class ImageData(Section):
    """How images are read and augmented. Random numbers of an image are a function of the seed, its number and the
    epoch."""

    format: Literal["auto", "idx", "folder", "tar", "parquet"] = "auto"
    """Files of data.source: idx (the original files of MNIST, also .gz), folder (a folder for each class, or train/ and
    val/ with such folders), tar (shards of WebDataset: NAME.jpg and NAME.cls or NAME.json), parquet (columns image and
    label). auto looks at the files."""
    size: int | None = Field(None, ge=1, le=65_536)
    """Side of the images in pixels: they are scaled and cropped to it. Default: as in the files."""
    channels: Literal[1, 3] | None = None
    """Colours: 1 is grey. Default: those of the model, or of a module of your own, 3 unless the files are grey."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted from the values of a colour, which are between 0 and 1; one for all colours, or one for each."""
    std: tuple[float, ...] = (0.5,)
    """Divides them then."""
    crop: float = Field(0.0, ge=0, le=1)
    """Random resized crop: a part with at least this share of the area, such as 0.08, is scaled to `size`; 0 turns it
    off."""
    shift: int = Field(0, ge=0, le=1024)
    """Largest random shift of an image in pixels, with black at its edges."""
    flip: float = Field(0.0, ge=0, le=1)
    """Probability of a horizontal flip."""
    autoaugment: bool = False
    """Apply a random pair of operations of AutoAugment's policy for ImageNet."""
    randaugment: int = Field(0, ge=0, le=16)
    """Random operations of RandAugment on an image."""
    magnitude: int = Field(9, ge=0, le=30)
    """Strength of RandAugment."""
    erase: float = Field(0.0, ge=0, le=1)
    """Probability of erasing a random rectangle."""
    prompt: str = Field("a photo of a {}", pattern=r"^[^{}]*\{\}[^{}]*$")
    """Caption of an image in a folder of a class, whose name replaces {} (clip)."""
    mixup: float = Field(0.0, ge=0, le=100)
    """Mixup: alpha of the Beta distribution of the share of a second image, such as 0.8; 0 turns it off."""
    cutmix: float = Field(0.0, ge=0, le=100)
    """CutMix: the same for a rectangle of a second image, such as 1.0. With both, each mixes half of the images."""

    @property
    def augments(self) -> bool:
        """Whether training images are changed at random."""
        drawn = (self.crop, self.shift, self.flip, self.randaugment, self.erase, self.mixup, self.cutmix)
        return self.autoaugment or any(drawn)


class Data(Section):
    """Where samples come from, and how they are tokenized and masked."""

    source: str = "pydoc"
    """pydoc (Python's reference documentation), stdlib (Python's source code), docstrings (questions about Python's
    functions, with answers), synthetic, the path of a token store made by `weft data build`, a file or folder of
    data.format, hf:ORG/NAME (a Hugging Face dataset in the local caches, with data.format), mnist, fashion-mnist, the
    path of image files, movielens or a folder with its files, or your own dataset as package.module:name. Files may be
    named together, as in shard-{000..007}.tar."""
    format: Literal["text", "chat", "instruction", "labels", "pairs", "captions"] | None = None
    """What the files at data.source hold: text, conversations (chat), questions with answers (instruction), texts with
    labels (labels, of bert with model.classes), pairs of texts (pairs, of t5), or images with captions (captions, of
    clip, for which it is the default). Then it may be a JSONL, parquet or arrow file or a folder, for labels and pairs
    also a TSV file; docs/workloads.md describes captions. Default: data.source is no such file."""
    template: str | None = None
    """Chat template of chat and instruction: chatml, plain, or the path of a .jinja file. Default: the tokenizer's."""
    answers_only: bool = True
    """Train only on the tokens of answers, of chat and instruction."""
    packing: bool = True
    """Put several conversations into a sample, without attention between them; false: one a sample."""
    field: str = "text"
    """Field of a record with the text, of formats text and labels; `a.b` is the field b of the field a."""
    source_field: str = "source"
    """Field of a record with the source text, of format pairs."""
    target_field: str = "target"
    """Field of a record with the target text, of format pairs."""
    bucket: bool = True
    """Put pairs of similar lengths into a batch, so that there is less padding: they are sorted by length, and shuffled
    in blocks of 8 global batches (pairs, with shuffle: samples)."""
    label_field: str = "label"
    """Field of a record with its label, a number or a text, of format labels."""
    growing: bool = False
    """data.source is a folder that gets new shards: token stores, or files of format text, chat, instruction or pairs.
    A run reads each sample once, ends when there are no more, and reads only new shards when it is started again."""
    streaming: bool = False
    """Tokenize data.source while the run trains, part by part, instead of all of it before the first step; of formats
    text, chat and instruction. Of a mixture, all sources that are files of records."""
    mixture: tuple[MixtureSource, ...] = ()
    """Several sources with weights, instead of data.source."""
    anneal_from: float = Field(1.0, ge=0, le=1)
    """Share of the run's samples after which the weights of the mixture change to their final_weight."""
    temperature: float | None = Field(None, gt=0, le=1e9)
    """Weights of the mixture from the sizes of its sources: the share of a source with n training samples is in
    proportion to n^(1/temperature). 1 reads them by size, large values evenly. Default: their weight."""
    shuffle: Literal["samples", "blocks", "none"] = "samples"
    """Shuffle samples one by one, or blocks of data.shuffle_block neighbours and the samples in each, or do not."""
    shuffle_block: int = Field(1024, ge=1, le=2**31)
    """Samples of a block (shuffle: blocks)."""
    seq_len: int = Field(128, ge=1, le=2**31)
    """Sequence length: tokens per sample; of t5, of the source and of the target, of pairs at most."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json. A token store has its own tokenizer."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of the corpus, at its end, held out for evaluation."""
    mask_documents: bool = False
    """Mask attention between packed documents: positions restart in each, and no token predicts the next document."""
    mask_rate: float = Field(0.15, gt=0, lt=1)
    """Share of the tokens that a masked language model (bert) predicts. Of these, 80 % become the mask token, 10 % a
    random token, and 10 % stay; which ones is a function of the seed, the sample and the epoch."""
    mask_token: int | None = Field(None, ge=0, lt=2**31)
    """Token that hides others (bert). Default: the tokenizer's [MASK] or <mask>, else the last of model.vocab."""
    drop_last: bool = False
    """End an epoch with its last whole batch: the samples after it are left out, others in each epoch. By default a
    batch continues with the next epoch, so that every sample is read once an epoch."""
    images: ImageData | None = None
    """Read images from data.source, as this section says."""
    negatives: int = Field(4, ge=1, le=100_000)
    """Items that a user has not rated, drawn anew in each epoch for each rated one (movielens)."""
    prefetch: Annotated[int, SamplesUnchanged()] = Field(2, ge=0, le=1000)
    """Batches to read ahead in the background."""
    workers: Annotated[Annotated[int, Field(ge=0, le=1024)] | Literal["auto"], SamplesUnchanged()] = "auto"
    """Processes of a rank that read samples, for decoding and augmentation; 0 reads in the background thread. auto uses
    the cores of a GPU rank for images and for your own datasets with random transforms, for which it is 1 on a CPU."""
    record_ids: Annotated[bool, SamplesUnchanged()] = False
    """Log the samples that each rank reads at each step to samples/rank-*.jsonl."""

    @property
    def pads_batches(self) -> bool:
        """Whether samples have different lengths, and those of a batch are padded to the longest."""
        return self.format in ("labels", "pairs")

    @property
    def buckets(self) -> bool:
        """Whether pairs are sorted by length and shuffled in blocks."""
        return self.format == "pairs" and self.bucket and self.shuffle == "samples"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks; none if the mixture has no names."""
        return tuple(each.name for each in self.mixture if each.name is not None)

    @property
    def separates_documents(self) -> bool:
        """Whether attention is masked between documents: by mask_documents, or in packed conversations."""
        sources = [(s.source, s.format or self.format) for s in self.mixture] or [(self.source, self.format)]
        return self.mask_documents or any(
            format in ("chat", "instruction", "labels", "pairs")
            or source == "docstrings"
            or (Path(source) / MASK).is_file()
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
        if self.temperature is not None:
            if not self.mixture:
                raise ValueError("must have a mixture for its temperature")
            if any(each.weight != 1 or each.final_weight is not None for each in self.mixture):
                raise ValueError("must have a temperature or the weights of its mixture, not both")
        if len(set(self.tasks)) != len(self.mixture) and self.tasks:
            raise ValueError("must have a mixture with another name for every source, or without names")
        if any(each.loss is not None and each.name is None for each in self.mixture):
            raise ValueError("must have a mixture with a name for every source that has a loss")
        return self


def sample_fields() -> tuple[str, ...]:
    """The fields of `data` that determine the samples."""
    return tuple(
        name
        for name, info in Data.model_fields.items()
        if not any(isinstance(mark, SamplesUnchanged) for mark in info.metadata)
    )
