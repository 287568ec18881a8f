"""Formats in which `weft export` writes the weights of a run. Extensions register theirs."""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.registry import Registry


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
