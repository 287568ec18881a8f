"""Weights in and out: what reads published checkpoints (`model.implementation`), and the formats of `weft export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.registry import Registry


@dataclass(frozen=True)
class Implementation:
    """Reads the published checkpoint that model.pretrained names. Functions are named as `module:function`, and take
    the name of the checkpoint."""

    name: str
    help: str
    reads: str
    """To whether its model_type is known."""
    fields: str
    """To the fields of `model`."""
    tokenizer: str
    """To the path of its tokenizer.json, or None."""
    weights: str
    """`module:class` of its weights, made from the name and the Model section. Its method `fill` reads this rank's
    shards of named tensors in place."""
    end_tokens: str
    """To the tokens that end a text; none where the checkpoint is gone."""
    positions: str
    """To the positions that its model was trained with; None where the checkpoint does not say."""
    family: str = ""
    """The family of its models; empty if it has many."""
    export: str = ""
    """`module:function` that writes a folder of a trained model, where that is not what the format hf does."""
    fallback: bool = False
    """Whether auto takes it only where no other implementation knows the model_type."""


IMPLEMENTATIONS: Registry[Implementation] = Registry("model.implementation", __name__)


def choose_implementation(name: str, wanted: str = "auto") -> Implementation:
    """The implementation of a checkpoint: the wanted one or, if that is auto, the first that knows its model_type."""
    if wanted != "auto":
        return IMPLEMENTATIONS[wanted]
    entries = sorted(IMPLEMENTATIONS, key=lambda entry: entry.fallback)
    if not entries:
        raise JobError(f"model.pretrained={name}: no extension reads published checkpoints")
    return next((e for e in entries if find_object(e.reads, "model.implementation")(name)), entries[0])


def implementation_of(family: str | None) -> Implementation:
    """The implementation that makes models of a family."""
    entries = list(IMPLEMENTATIONS)
    return next((e for e in entries if e.family and e.family == family), next(e for e in entries if not e.family))


def read_published(name: str, what: str) -> Any:
    """A fact of a published checkpoint: the value of a function of its Implementation."""
    return find_object(getattr(choose_implementation(name), what), "model.pretrained")(name)


@dataclass(frozen=True)
class ExportFormat:
    """A format of weights."""

    name: str
    """As `--to` takes it."""
    output: str
    """The default name of the export in the run's folder: a file if it has a suffix, else a folder."""
    write: str
    """`module:function` of (run, checkpoint, format, path, options, the user's job, trust_module) that writes it and
    returns the bytes of the weights."""


EXPORT_FORMATS: Registry[ExportFormat] = Registry("--to", __name__)

for name, output in (("safetensors", "model.safetensors"), ("torch", "model.pt")):
    EXPORT_FORMATS.register(ExportFormat(name, output, "weft.training.export:export_own_names"))
