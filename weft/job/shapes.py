"""Named shapes of models, and the resolution of a model's fields."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any

from weft.job.data_files.image_folders import count_classes
from weft.job.data_files.token_files import META, TOKENIZER, mask_token, read_meta, tokenizer_vocab
from weft.job.errors import JobError
from weft.job.field_uses import check_field_uses, check_own_module
from weft.job.import_by_name import find_object
from weft.job.model import FAMILIES, IMPLEMENTATIONS, Family, Implementation
from weft.job.schema import Data, Experts, Job, Model

# dim, layers, heads, kv_heads, ffn, vocab; as published with each model
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(family="llama", dim=64, layers=4, heads=4, kv_heads=2, ffn=192),
    "small": dict(family="llama", dim=192, layers=6, heads=6, kv_heads=6, ffn=512),
    "gpt2-tiny": dict(family="gpt2", dim=64, layers=4, heads=4, ffn=256),
    "gpt2-125m": dict(family="gpt2", dim=768, layers=12, heads=12, ffn=3072, vocab=50257, max_len=1024),
    "gpt2-1.5b": dict(family="gpt2", dim=1600, layers=48, heads=25, ffn=6400, vocab=50257, max_len=1024),
    "gpt3-175b": dict(family="gpt2", dim=12288, layers=96, heads=96, ffn=49152, vocab=50257, max_len=2048),
    "llama-125m": dict(family="llama", dim=768, layers=12, heads=12, kv_heads=12, ffn=2048, vocab=32000),
    "llama-1b": dict(family="llama", dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256),
    "llama-3b": dict(family="llama", dim=3072, layers=28, heads=24, kv_heads=8, ffn=8192, vocab=128256),
    "llama-7b": dict(family="llama", dim=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab=32000),
    "llama-8b": dict(family="llama", dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "llama-13b": dict(family="llama", dim=5120, layers=40, heads=40, kv_heads=40, ffn=13824, vocab=32000),
    "llama-70b": dict(family="llama", dim=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    "llama-405b": dict(family="llama", dim=16384, layers=126, heads=128, kv_heads=8, ffn=53248, vocab=128256),
    "bert-tiny": dict(family="bert", dim=64, layers=2, heads=4, ffn=256),
    "bert-base": dict(family="bert", dim=768, layers=12, heads=12, ffn=3072, vocab=30522, max_len=512),
    "bert-large": dict(family="bert", dim=1024, layers=24, heads=16, ffn=4096, vocab=30522, max_len=512),
    "t5-tiny": dict(family="t5", dim=64, layers=4, heads=4, ffn=256),
    "t5-small": dict(family="t5", dim=512, layers=12, heads=8, ffn=2048, vocab=32128),
    "t5-base": dict(family="t5", dim=768, layers=24, heads=12, ffn=3072, vocab=32128),
    "t5-v1.1-xl": dict(
        family="t5", dim=2048, layers=48, heads=32, head_dim=64, ffn=5120, vocab=32128, activation="geglu", tied=False,
    ),
    "vit-tiny": dict(family="vit", dim=64, layers=2, heads=4, ffn=128, vocab=10),
    "vit-b": dict(family="vit", dim=768, layers=12, heads=12, ffn=3072, vocab=1000),
    "vit-l": dict(family="vit", dim=1024, layers=24, heads=16, ffn=4096, vocab=1000),
    "vit-h": dict(family="vit", dim=1280, layers=32, heads=16, ffn=5120, vocab=1000),
    "resnet-18": dict(family="resnet", layers=18, vocab=1000),
    "resnet-50": dict(family="resnet", layers=50, vocab=1000),
    "resnet-101": dict(family="resnet", layers=101, vocab=1000),
    "clip-tiny": dict(
        family="clip", dim=32, towers=dict(
            image=dict(dim=64, layers=2, heads=4, patch=8), text=dict(dim=48, layers=2, heads=4)
        ),
    ),
    "clip-vit-b32": dict(
        family="clip", dim=512, vocab=49408, max_len=77, towers=dict(
            image=dict(dim=768, layers=12, heads=12, patch=32), text=dict(dim=512, layers=12, heads=8)
        ),
    ),
    "clip-vit-b16": dict(
        family="clip", dim=512, vocab=49408, max_len=77, towers=dict(
            image=dict(dim=768, layers=12, heads=12, patch=16), text=dict(dim=512, layers=12, heads=8)
        ),
    ),
    "clip-vit-l14": dict(
        family="clip", dim=768, vocab=49408, max_len=77, towers=dict(
            image=dict(dim=1024, layers=24, heads=16, patch=14), text=dict(dim=768, layers=12, heads=12)
        ),
    ),
    "moe-tiny": dict(
        family="llama", dim=64, layers=4, heads=4, kv_heads=2, ffn=192,
        experts=dict(count=8, top_k=2, ffn=96, router="sigmoid", scale=2.0, balance="bias", bias_rate=0.01),
    ),
    "mixtral-8x7b": dict(
        family="llama", dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=32000, rope_theta=1e6,
        experts=dict(count=8, top_k=2),
    ),
    "qwen3-30b-a3b": dict(
        family="llama", dim=2048, layers=48, heads=32, kv_heads=4, head_dim=128, ffn=6144, vocab=151936, qk_norm=True,
        rope_theta=1e6, experts=dict(count=128, top_k=8, ffn=768),
    ),
    "deepseek-v3-16b": dict(
        family="llama", dim=2048, layers=27, heads=16, head_dim=192, rope_dim=64, ffn=10944, vocab=102400,
        latent=dict(kv_rank=512, v_dim=128),
        experts=dict(count=64, top_k=6, ffn=1408, shared=2, first_dense=1, renormalize=False),
    ),
    "deepseek-v3-671b": dict(
        family="llama", dim=7168, layers=61, heads=128, head_dim=192, rope_dim=64, ffn=18432, vocab=129280,
        latent=dict(q_rank=1536, kv_rank=512, v_dim=128),
        experts=dict(
            count=256, top_k=8, ffn=2048, shared=1, first_dense=3, groups=8, top_groups=4, router="sigmoid",
            scale=2.5, balance="bias", aux_weight=1e-4,
        ),
    ),
    "mlp-tiny": dict(family="mlp", dim=32, layers=8),
    "mlp": dict(family="mlp", dim=256, layers=16),
}  # fmt: skip
ALIASES = {
    "125m": "llama-125m", "1b": "llama-1b", "3b": "llama-3b", "7b": "llama-7b", "8b": "llama-8b", "13b": "llama-13b",
    "70b": "llama-70b", "405b": "llama-405b", "175b": "gpt3-175b", "gpt2": "gpt2-125m",
}  # fmt: skip


def resolve(job: Job) -> Job:
    """The job with every field of its model resolved: given fields first, then the shape, then the family."""
    if job.model.module:
        if job.model.family is None:
            check_own_module(job.model)
        return _with_class_loss(job)
    if job.model.pretrained and job.model.family is None:  # else it is resolved, and the checkpoint may be elsewhere
        job = _with_pretrained(job, job.model.pretrained)
    model, data = _resolve_model(job.model, job.data), job.data
    side = data.images.size if data.images is not None else None
    sides = (side, side) if side else model.image
    if model.takes_patches and sides and "seq_len" not in data.model_fields_set:
        patches = math.prod(pixels // (model.patch or 4) for pixels in sides)
        data = data.model_copy(update={"seq_len": max(1, patches) + bool(model.class_token)})
        model = _resolve_model(job.model, data)
    if model.towers and model.max_len and "seq_len" not in data.model_fields_set:
        data = data.model_copy(update={"seq_len": model.max_len})
    if model.towers and model.max_len and data.seq_len > model.max_len:
        raise JobError(
            f"data.seq_len={data.seq_len} is longer than model.max_len={model.max_len}; "
            f"seq_len={model.max_len} would work"
        )
    return _with_class_loss(job.model_copy(update={"model": model, "data": data}))


def _with_class_loss(job: Job) -> Job:
    """The job with cross-entropy for mixed images, whose targets are probabilities; auto would take them as values."""
    images, model = job.data.images, job.model
    if not (model.module and model.loss == "auto" and images is not None and (images.mixup or images.cutmix)):
        return job
    return job.model_copy(update={"model": model.model_copy(update={"loss": "cross_entropy"})})


def _with_pretrained(job: Job, name: str) -> Job:
    """The job with the fields and, where it names no other, the tokenizer of a published checkpoint."""
    given = {n: v for n, v in job.model.model_dump(exclude_unset=True, exclude_none=True).items() if n != "dropout"}
    for field in given.keys() - {"pretrained", "implementation", "experts", "lora", "classes"}:
        if field in Model.model_fields:
            raise JobError(f"model.{field} is set by the config of model.pretrained={name}; leave it out")
    fields = find_object(_implementation(job.model.implementation, name).fields, "model.pretrained")(name)
    if "experts" in given and "experts" in fields:  # such as experts.balance, which only training uses
        fields["experts"] = {**fields["experts"], **given["experts"]}
    kept: dict[str, Any] = {"pretrained": name, "implementation": job.model.implementation}
    kept |= {"dropout": job.model.dropout or 0.0, "lora": given.get("lora")}
    if "classes" in given and fields["family"] == "vit":
        kept["vocab"] = given["classes"]
    elif "classes" in given:
        kept |= {"classes": given["classes"], "tied": False}
    model = Model.model_validate(fields | kept)
    data = job.data
    if "tokenizer" not in data.model_fields_set:
        tokenizer = find_object("weft.pretrained.config:tokenizer_path", "model.pretrained")(name)
        data = data.model_copy(update={"tokenizer": tokenizer or data.tokenizer})
    if model.takes_patches and "seq_len" not in data.model_fields_set:
        data = data.model_copy(update={"seq_len": model.max_len})
    return job.model_copy(update={"model": model, "data": data})


def _implementation(wanted: str, name: str) -> Implementation:
    """The implementation of a checkpoint: the wanted one or, if that is auto, the first that knows its model_type."""
    if wanted != "auto":
        return IMPLEMENTATIONS[wanted]
    core = list(IMPLEMENTATIONS.core())
    for entry in core:
        if find_object(entry.reads, "model.implementation")(name):
            return entry
    others = (entry for entry in IMPLEMENTATIONS if entry not in core)
    return next((e for e in others if find_object(e.reads, "model.implementation")(name)), core[0])


MISSING = {
    "tables": "such as tables: [{name: user, rows: 1000}]",
    "towers": "or name a model.shape such as clip-tiny or clip-vit-b32",
}
"""What to give where a needed field is missing."""


def _resolve_model(model: Model, data: Data) -> Model:
    given = model.model_dump(exclude_none=True, exclude={"shape", "args", "loss"})
    own = {"tables", "table_optim", "dense_features", "bottom", "top", "towers"}  # with defaults of their own, not None
    given = {name: value for name, value in given.items() if name not in own or name in model.model_fields_set}
    if model.loss != "auto":
        given["loss"] = model.loss
    shape = _shape(model.shape or ("tiny" if not {"family", "dim", "layers"} & given.keys() else None))
    if "family" in given and given["family"] != shape.get("family", given["family"]):
        shape = {k: v for k, v in shape.items() if k != "kv_heads"}
    if model.experts is not None:  # given fields of the experts override the shape's
        given["experts"] = {
            **(shape.get("experts") or {}),
            **model.experts.model_dump(exclude_unset=True, exclude_none=True),
        }
    fields: dict[str, Any] = {"family": "llama", **shape, **given}
    family = FAMILIES[fields["family"]]
    if family.config and "dim" not in fields:
        fields = {**find_object(family.config, "model.family")(model.args), **fields}
    fields = {**family.defaults, **fields}
    if model.pretrained is None:  # configs name what their other models use
        check_field_uses(model, fields, family)
    if model.classes is not None and family.structure != "encoder":
        raise JobError(
            f"model.classes are labels of bert, and model.family is {family.name}; leave it out, or write "
            f"model.vocab={model.classes} for classes of images"
        )
    for name in family.needed:
        if not fields.get(name):
            hint = MISSING.get(name, "or name a model.shape such as tiny or llama-1b")
            raise JobError(f"model.{name} is missing; give it, {hint}")
    if family.structure == "module":
        return _module_of(family, Model.model_validate({**model.model_dump(exclude_none=True), **fields}), data)
    if family.structure != "stack":
        _fill_transformer(fields, data)
    return Model.model_validate({**model.model_dump(exclude_none=True), **fields})


def _module_of(family: Family, model: Model, data: Data) -> Model:
    """The module and arguments of a family that trains as a user's module would; model.args override the latter."""
    assert family.args is not None
    args = find_object(family.args, "model.family")(model, data)
    return model.model_copy(update={"module": family.build, "args": {**args, **model.args}})


def _fill_transformer(fields: dict[str, Any], data: Data) -> None:
    dim, heads, structure = fields["dim"], fields["heads"], FAMILIES[fields["family"]].structure
    grouped = fields.get("kv_heads")
    fields.setdefault("kv_heads", heads)
    if heads % fields["kv_heads"]:
        near = max(k for k in range(1, min(heads, fields["kv_heads"]) + 1) if heads % k == 0)
        raise JobError(
            f"model.heads={heads} is not a multiple of model.kv_heads={fields['kv_heads']}; kv_heads={near} would work"
        )
    if "head_dim" not in fields:
        if dim % heads:
            near = max(h for h in range(1, heads + 1) if dim % h == 0)
            possible = [h for h in range(1, heads + 1) if dim % h == 0 and h % (grouped or 1) == 0]
            works = f"heads={max(possible)}" if possible else f"heads={near} with kv_heads={near}"
            raise JobError(f"model.dim={dim} is not a multiple of model.heads={heads}; {works} would work")
        fields["head_dim"] = dim // heads
    if fields["positions"] == "relative" and structure != "encoder_decoder":
        raise JobError("model.positions=relative is for model.family=t5; learned or rope would work")
    if fields["positions"] == "rope" and fields["head_dim"] % 2:
        raise JobError(f"rotary positions need an even head size; model.head_dim is {fields['head_dim']}")
    if (latent := fields.get("latent")) is not None:
        if not fields.get("rope_dim") or fields["kv_heads"] != heads:
            raise JobError("model.latent needs model.rope_dim, and model.kv_heads equal to model.heads")
        if (width := dict(latent).get("v_dim", 128)) > fields["head_dim"]:
            raise JobError(f"model.latent.v_dim={width} is larger than model.head_dim={fields['head_dim']}")
    if "ffn" not in fields:
        plain = fields["activation"] in ("gelu", "quick_gelu", "relu", "silu") or structure == "encoder"
        fields["ffn"] = 4 * dim if plain else -(-8 * dim // (3 * 64)) * 64
    if structure == "encoder_decoder":
        _fill_encoder_decoder(fields)
    if fields.get("experts") is not None:
        usual = {name: Experts.model_fields[name].default for name in ("count", "top_k", "groups")}
        fields["experts"] = {"ffn": fields["ffn"], **usual, **fields["experts"]}
    if structure == "classifier":
        fields.setdefault("vocab", count_classes(data) or 10)
    if fields.get("classes") is not None:
        fields["tied"] = False  # the head has a row for each label
    unmasked = structure == "encoder" and not fields.get("classes") and data_mask_token(data) is None
    fields.setdefault("vocab", (data_vocab(data) or 256) + int(unmasked))
    fields.setdefault("max_len", data.seq_len)
    if fields["positions"] == "learned" and data.seq_len > fields["max_len"]:
        raise JobError(
            f"data.seq_len={data.seq_len} is longer than the learned positions, model.max_len={fields['max_len']}; "
            "shorten it, raise max_len, or use model.positions=rope"
        )


def _fill_encoder_decoder(fields: dict[str, Any]) -> None:
    """Blocks of the encoder and the scale of the head, and a JobError for what such models do not have."""
    for name in ("latent", "window", "sinks", "parallel_residual", "qk_norm", "rope_scaling"):
        if fields.get(name):
            raise JobError(f"model.{name} is not supported by model.family={fields['family']}; leave it out")
    if fields["positions"] != "relative" or fields.get("norm_at") not in (None, "input"):
        raise JobError(f"model.family={fields['family']} has relative positions and norms at inputs; leave them out")
    layers = fields["layers"]
    encoder = fields.setdefault("encoder_layers", layers // 2)
    if not 0 < encoder < layers:
        raise JobError(
            f"model.layers={layers} counts the blocks of encoder and decoder, and model.encoder_layers={encoder} "
            f"leaves one of them without any; layers={2 * max(encoder, 1)} would work"
        )
    fields.setdefault("head_scale", fields["dim"] ** -0.5 if fields["tied"] else 1.0)


def _shape(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    key = ALIASES.get(name.lower(), name.lower())
    if key in SHAPES:
        return SHAPES[key]
    near = difflib.get_close_matches(key, [*SHAPES, *ALIASES], n=1)
    hint = f"did you mean {near[0]}?" if near else f"shapes: {', '.join(SHAPES)}"
    raise JobError(f"model.shape={name!r} is not known; {hint}")


def first_source(data: Data) -> Path:
    """The path of the data, of the first source of a mixture, or of the first token store of a growing source."""
    source = Path(data.mixture[0].source if data.mixture else data.source)
    try:
        source.stat()
    except FileNotFoundError:
        pass  # those who open the data say so
    except OSError as error:
        raise JobError(f"data.source={str(source)[:80]} cannot be read: {error.strerror}") from error
    stores = sorted(source.glob(f"*/{META}")) if data.growing and data.format is None else []
    return stores[0].parent if stores else source


def data_mask_token(data: Data) -> int | None:
    """The mask token of the data's tokenizer, or data.mask_token; None if there is none."""
    if data.mask_token is not None:
        return data.mask_token
    source = first_source(data)
    if (source / META).is_file():
        return mask_token(source) if (source / TOKENIZER).is_file() else None
    return mask_token(data.tokenizer)


def data_vocab(data: Data) -> int | None:
    """Vocabulary size of the data's tokenizer, or None if the model decides (synthetic data, a dataset of your own)."""
    sources = [each.source for each in data.mixture] or [data.source]
    if sources[0] == "synthetic" or (":" in sources[0] and not data.format):
        return None
    if (first_source(data) / META).is_file():
        return read_meta(first_source(data)).vocab
    return 256 if data.tokenizer == "bytes" else tokenizer_vocab(data.tokenizer)
