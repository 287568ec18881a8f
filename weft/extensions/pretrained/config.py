"""From a config.json to the fields of `model`, and from a model to a config.json. Does not need torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.extensions.pretrained.checkpoint_folder import CONFIG, TOKENIZER, existing_folder, find_folder
from weft.extensions.pretrained.config_fields import NULL_KEYS, Config, Fields
from weft.extensions.pretrained.family_entry import PRETRAINED, PretrainedFamily, families_of
from weft.extensions.pretrained.image_families import image_size
from weft.extensions.pretrained.llama2c_tokenizer import converted_tokenizer
from weft.extensions.pretrained.repeated_tensors import is_tied
from weft.job.errors import JobError
from weft.job.files.checked_files import read_json
from weft.job.model import FAMILIES
from weft.job.registry import did_you_mean, listed
from weft.job.schema import Model

HEAD_KEYS = ("tie_word_embeddings", "scale_decoder_outputs")
"""Keys that say whether the head is the embedding, which files may contradict."""


def reads(name: str) -> bool:
    """Whether Weft has a family for the model_type of a checkpoint."""
    folder = existing_folder(name)
    return folder is not None and bool(families_of(read_json(folder / CONFIG).get("model_type")))


def model_fields(name: str) -> Fields:
    """The fields of `model` for a checkpoint: a folder or a name in the hub cache."""
    folder = find_folder(name)
    family, fields = read_fields(read_json(folder / CONFIG), str(folder / CONFIG))
    if family.head:
        fields["tied"] = is_tied(folder, family, bool(fields.get("tied")))
    return fields


def tokenizer_path(name: str) -> str | None:
    """The tokenizer.json of a checkpoint, or one made from its tokenizer of llama2.c; None if it has neither."""
    folder = find_folder(name)
    path = folder / TOKENIZER
    found = path if path.is_file() else converted_tokenizer(folder)
    return None if found is None else str(found)


def read_fields(raw: Mapping[str, Any], where: str) -> tuple[PretrainedFamily, Fields]:
    """The family of a config and the fields of the model that it describes."""
    kind = raw.get("model_type")
    known = families_of(kind)
    if not known:
        kinds = list(dict.fromkeys(family.kind for family in PRETRAINED))
        hint = did_you_mean(kind, kinds) if isinstance(kind, str) else ""
        raise JobError(f"{where} has model_type={kind!r:.80}; Weft reads {listed(kinds)}{hint}")
    classes = raw.get("architectures") or [known[0].architecture]
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise JobError(f"{where} has architectures={classes!r:.80}; Weft needs a list of names")
    exact = [family for family in known if family.architecture in classes]
    family = next(iter(exact or [family for family in known if not {*family.also_reads}.isdisjoint(classes)]), None)
    if family is None:
        reads = dict.fromkeys(name for family in known for name in (family.architecture, *family.also_reads))
        raise JobError(f"{where} has architectures={classes!r:.80}; Weft reads {listed(reads)}")
    config, fields = Config(raw, where, family.kind), dict(FAMILIES[family.family].defaults)
    fields["family"] = family.family
    for converter in family.converters:
        for name, value in converter.read(config).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise config.wrong(name, value, "a finite number")
            fields[name] = {**fields.get(name, {}), **value} if name == "experts" else value
    config.check_all_taken()
    try:
        return family, Model.model_validate(fields).model_dump(exclude_none=True, exclude_unset=True)
    except (JobError, ValueError) as error:
        raise JobError(f"{where} describes a model that Weft cannot build: {error}") from None


def write_config(model: Model, kind: str | None = None, original: Mapping[str, Any] | None = None) -> Fields:
    """The config of a model: the original one if it still describes it, else one of the first family that can."""
    if original is not None:
        family, wanted = read_fields(original, CONFIG)[0], described(model)
        head = {k: v for c in family.converters for k, v in c.write(model).items() if k in HEAD_KEYS}
        for config in (dict(original), {**original, **head}):
            if described(Model.model_validate(read_fields(config, CONFIG)[1])) == wanted:
                return {**config, "architectures": [family.architecture]}
        kind = family.kind
    for family in PRETRAINED:
        if kind in (None, family.kind) and (found := _written(family, model)) is not None:
            return found
    what = f"the family {kind}" if kind else "any family of transformers that Weft writes"
    raise JobError(f"this model cannot be written as {what}; --to safetensors writes it with Weft's own names")


def _written(family: PretrainedFamily, model: Model) -> Fields | None:
    if family.family != model.family:
        return None
    out: Fields = {"architectures": [family.architecture], "model_type": family.kind}
    for converter in family.converters:
        out |= converter.write(model)
    out = {key: value for key, value in out.items() if value is not None or key in NULL_KEYS}
    try:
        fields = read_fields(out, CONFIG)[1]
    except JobError:
        return None
    if described(Model.model_validate(fields)) != described(model):
        return None
    return {**dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")), **out}  # not the family's defaults


_OF_EXPERTS = (
    "biases", "count", "top_k", "shared_width", "shared_gate", "first_dense", "groups", "top_groups", "router", "scale",
)  # fmt: skip


def described(model: Model) -> Fields:
    """What a model computes, without what only its training uses; equal for two spellings of one model."""
    rope = model.positions == "rope"
    scaling = model.rope_scaling.model_dump() if rope and model.rope_scaling else None
    e = model.experts
    experts = e and {n: getattr(e, n) for n in _OF_EXPERTS} | {
        "ffn": e.ffn or model.ffn,
        "renormalize": e.top_k > 1 if e.renormalize is None else e.renormalize,
        "bias": e.balance == "bias",
    }
    towers = {n: {**t.model_dump(), "ffn": t.width} for n, t in model.towers.items()}
    layers = model.layers or 0
    windowed = tuple(i for i in range(layers) if model.has_window(i))
    return {
        **{n: getattr(model, n) for n in ("family", "dim", "layers", "heads", "ffn", "vocab", "norm", "norm_eps")},
        **{n: getattr(model, n) for n in ("positions", "embedding_scale", "activation", "causal")},
        **{n: getattr(model, n) for n in ("token_types", "classes", "encoder_layers", "position_buckets")},
        **{n: getattr(model, n) for n in ("position_limit", "head_scale")},
        **({"patch": model.patch or 4, "channels": model.channels or 3} if model.takes_patches else {}),
        "class_token": bool(model.class_token),
        "image": model.image if towers else model.class_token and image_size(model),
        "towers": towers,
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_dim or (model.dim or 0) // (model.heads or 1),
        "norm_at": model.norm_at or "input",
        "norm_bias": model.norm == "layernorm" and bool(model.bias),
        "biases": model.biases,
        "qk_norm": model.qk_norm or False,
        "sinks": bool(model.sinks),
        "clamp": (model.swiglu_limit or 7.0, model.swiglu_alpha or 1.702)
        if model.activation == "swiglu_clamped"
        else None,
        "attention_scale": model.attention_scale,
        "tied": bool(model.tied),
        "parallel_residual": bool(model.parallel_residual),
        "theta": model.rope_theta if rope else None,
        "rope_dim": (model.rope_dim or model.head_dim) if rope else None,
        "scaling": scaling,
        "latent": model.latent and model.latent.model_dump(),
        "window": model.window if windowed else None,
        "windowed": windowed,
        "window_theta": model.window_theta if windowed else None,
        "max_len": model.max_len if model.positions == "learned" else None,
        "experts": experts,
    }
