"""The registry of families of published checkpoints: one entry for each model_type of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.extensions.pretrained.config_fields import Converter
from weft.job.registry import Registry


@dataclass(frozen=True)
class Fused:
    """A tensor of a file that holds several parameters, or one in another form."""

    name: str
    """Its name in the file."""
    form: str
    """How it holds them (pretrained/tensor_forms.py)."""


@dataclass(frozen=True)
class PretrainedFamily:
    """A family of published checkpoints."""

    name: str
    """model_type of its configs, unless that is given."""
    help: str
    architecture: str
    """The class of transformers that has its weights and gives logits."""
    family: str
    """Weft's model.family."""
    converters: tuple[Converter, ...]
    """How keys of a config become fields of the model."""
    names: Mapping[str, str | Fused]
    """By the name of a parameter, that of the tensor in a file; {i} is a block, {e} an expert, {p} weight or bias,
    {gated} _1 in a model with a gate, {untied} `decoder.` in a model whose head is not tied."""
    prefix: str = "model."
    """Prefix of the names that files of the bare model leave out."""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Patterns of tensors in files that are not parameters; {layers} is the number of blocks."""
    model_type: str = ""
    """Where several families have one."""
    also_reads: tuple[str, ...] = ()
    """Other classes of transformers whose files it reads."""
    fresh: tuple[str, ...] = ()
    """Patterns of parameters that files of those may lack: they get initial values."""
    older_endings: Mapping[str, str] = field(default_factory=dict)
    """Endings of names in older files, and those of today."""
    always_tied: bool = False
    """Whether transformers ties the head whatever the config says."""
    repeats: Mapping[str, str] = field(default_factory=dict)
    """Tensors beside the head that transformers ties with it, and the tensor that each repeats."""
    labels: bool = False
    """Whether it gives one label a sample."""

    @property
    def head(self) -> tuple[str, str] | None:
        """The names of the head and of the embedding that it may be tied to; None if the family has no such head."""
        head, embedding = self.names.get("head.weight"), self.names.get("embed.weight")
        return (head, embedding) if isinstance(head, str) and isinstance(embedding, str) else None

    @property
    def kind(self) -> str:
        """model_type of its configs."""
        return self.model_type or self.name


PRETRAINED: Registry[PretrainedFamily] = Registry("model_type", "weft.extensions.pretrained.families")


def families_of(kind: object) -> list[PretrainedFamily]:
    """The families with a model_type."""
    return [family for family in PRETRAINED if family.kind == kind]


def family_of(kind: object, labels: bool) -> PretrainedFamily:
    """The family with a model_type for a model that gives labels or does not."""
    return next(family for family in families_of(kind) if family.labels == labels)
