"""Settings of fine-tuning data: axolotl's list of datasets, and the masks and packing of conversations."""

from __future__ import annotations

from typing import Any

from weft.extensions.convert.settings import Result, Rule, Settings, absent, is_off, partly, switch, to, unneeded

FORMATS = {"chat_template": "chat", "sharegpt": "chat", "alpaca": "instruction", "completion": "text"}
"""Formats of records by the start of axolotl's `type`."""
LOCAL = "a file or folder of this machine; download a dataset of the hub first"
OWN_TEMPLATE = "the tokenizer's own chat template is used; data.template names another"

ANSWERS_ONLY: Rule = switch({"data.answers_only": False}, {"data.answers_only": True})
"""Whether questions are trained on too."""
PACKING: Rule = switch({"data.packing": True}, {"data.packing": False})


def record_format(kind: Any) -> str | None:
    """data.format of axolotl's `type`, such as alpaca or sharegpt.load_role."""
    return next((found for start, found in FORMATS.items() if str(kind).startswith(start)), None)


def _sources(settings: Settings) -> list[dict[str, Any]]:
    """The entries of `datasets` as entries of data.mixture."""
    found: list[dict[str, Any]] = []
    while (path := settings.get(f"datasets.{len(found)}.path")) is not None:
        prefix = f"datasets.{len(found)}"
        source = settings.get(f"{prefix}.data_files", path)
        entry = {"source": source if isinstance(source, str) else str(path)}
        kind = record_format(settings.get(f"{prefix}.type"))
        found.append({**entry, "format": kind} if kind else entry)
    return found


def _path(value: Any, settings: Settings) -> Result:
    sources = _sources(settings)
    if len(sources) == 1:
        return Result({"data.source": sources[0]["source"]}, LOCAL, "partly")
    return Result({"data.mixture": sources}, f"{LOCAL}; weights are equal", "partly")


def _type(value: Any, settings: Settings) -> Result:
    kind = record_format(value)
    if kind is None:
        return Result(note="data.format is text, chat or instruction", status="no counterpart")
    if "datasets.1.path" in settings:
        return Result(note="part of data.mixture", status="not needed")
    return Result({"data.format": kind})


def _template(value: Any, settings: Settings) -> Result:
    if is_off(value) or str(value).startswith("tokenizer_default"):
        return Result(note=OWN_TEMPLATE, status="not needed")
    return Result({"data.template": "chatml"}) if value == "chatml" else Result(note=OWN_TEMPLATE, status="not needed")


def _packing(value: Any, settings: Settings) -> Result:
    if any(source.get("format") in ("chat", "instruction") for source in _sources(settings)):
        return PACKING(value, settings)
    return switch({"data.mask_documents": True}, note="documents are packed and masked")(value, settings)


AXOLOTL: dict[str, Rule] = {
    "datasets.0.path": _path,
    "datasets.*.path": unneeded("part of data.mixture"),
    "datasets.*.type": _type,
    "datasets.*.field": to("data.field"),
    "datasets.*.data_files": unneeded("part of data.source"),
    "datasets.*.ds_type": unneeded("the files' names say it"),
    "datasets.*.split": unneeded("all records are read; data.val_fraction holds some out"),
    "datasets.*.field_messages": unneeded("messages, conversations, conversation, dialog and chat are found"),
    "datasets.*.message_*": unneeded("role and content, and from and value, are found"),
    "datasets.*.roles*": unneeded("user, human, assistant, gpt and system are known"),
    "datasets.*.*": absent("no such setting of a source in Weft"),
    "datasets*": absent("set data.source to the dataset's files"),
    "chat_template": _template,
    "chat_template_jinja": absent("write it to a .jinja file and set data.template to its path"),
    "train_on_inputs": ANSWERS_ONLY,
    "roles_to_train": partly(switch({"data.answers_only": True}), "the assistant's messages are trained on"),
    "sample_packing": _packing,
}
"""axolotl's settings of conversations."""
