"""Configs of tiny models with one key deleted, nulled, changed or added: Weft's logits beside those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
from helpers.published import CONFIGS, ENCODERS, LATENT, ROPE, SIZES, VOCAB, save_config, transformers
from weft.job.errors import JobError

_RANDOM = torch.Generator().manual_seed(1)
TOKENS = torch.randint(1, VOCAB, (2, 12), generator=_RANDOM)
TYPES = torch.randint(0, 3, (2, 12), generator=_RANDOM)
DELETED = object()
"""The value of a key that is left out."""
TOLERANCE = 1e-4
Edit = tuple[tuple[str, ...], Any]
"""The path of a key in config.json and its new value."""

MORE: dict[str, Callable[[], Any]] = {
    "llama with dynamic scaling": lambda: transformers.LlamaConfig(
        **{**SIZES, "max_position_embeddings": 8}, rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 2.5}
    ),
    "qwen3 with windows": lambda: transformers.Qwen3Config(
        **SIZES, head_dim=12, use_sliding_window=True, sliding_window=4, max_window_layers=1,
        rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                         "truncate": False, "beta_fast": 4.0, "beta_slow": 1.5},
    ),
    "deepseek_v2 with yarn": lambda: transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=12, n_shared_experts=2,
        rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                         "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "gemma3_text with scaling": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=12, sliding_window=6, tie_word_embeddings=False,
        rope_parameters={"full_attention": {**ROPE, "rope_type": "linear", "factor": 8.0},
                         "sliding_attention": {**ROPE, "rope_type": "default"}},
    ),
}  # fmt: skip
"""Configs with options that those of published.py lack."""
ADDED: Mapping[str, tuple[Any, ...]] = {
    "rope_theta": (None, 500.0), "rope_scaling": (None, {"type": "linear", "factor": 2.0}, {}),
    "partial_rotary_factor": (None, 0.5), "rope_local_base_freq": (None, 500.0),
    "tie_word_embeddings": (None, True, False), "scale_decoder_outputs": (None, True, False),
    "norm_topk_prob": (None, True, False), "rope_interleave": (None, False), "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"), "num_local_experts": (None, 4), "num_experts": (None, 4), "head_dim": (None, 8),
    "layer_types": (None, ["sliding_attention", "full_attention"]), "use_sliding_window": (None, True),
    "sliding_window": (None, 3), "sliding_window_pattern": (None, 2), "max_window_layers": (None, 1),
    "attention_bias": (None, True), "rotary_pct": (None, 0.5), "rotary_emb_base": (None, 500), "n_inner": (None, 48),
    "original_max_position_embeddings": (None, 8), "use_bidirectional_attention": (None, True),
    "attn_logit_softcapping": (None, 5.0), "scale_attn_by_inverse_layer_idx": (None, True),
    "hidden_size": (None, 64), "num_hidden_layers": (None, 1), "num_labels": (None, 3), "qkv_bias": (None, True, False),
    "is_gated_act": (None, True), "dense_act_fn": (None, "relu"), "add_cross_attention": (None, True),
    "decoder_sparse_step": (None, 2), "mlp_only_layers": (None, [1]), "mlp_bias": (None, True), "n_group": (None, 2),
    "output_hidden_states": (None, True), "chunk_size_feed_forward": (None, 4), "tie_encoder_decoder": (None, True),
}  # fmt: skip
"""Keys that a config may lack, and values that they get."""
WORDS = (
    "silu", "gelu", "relu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "gated-gelu", "default", "linear", "yarn",
    "longrope", "dynamic", "greedy", "group_limited_greedy", "regression", "",
)  # fmt: skip


@dataclass(frozen=True)
class Base:
    """The folder of a tiny model, its config, and the class of transformers that reads it."""

    name: str
    folder: Path
    config: dict[str, Any]
    kind: str


NAMES = (*CONFIGS, *MORE, *ENCODERS)


def saved(name: str, folder: Path) -> Iterator[Base]:
    """Save one tiny model; a config with rope_parameters gives one in the older spelling too."""
    kind, config = ENCODERS.get(name) or ("AutoModelForCausalLM", CONFIGS.get(name) or MORE[name])
    save_config(config(), folder, kind=kind)
    written = json.loads((folder / "config.json").read_text())
    yield Base(name, folder, written, kind)
    if (older := in_older_spelling(written)) is not None:
        yield Base(f"{name}, older spelling", folder, older, kind)


def in_older_spelling(config: dict[str, Any]) -> dict[str, Any] | None:
    """The config as versions before transformers 5 wrote it; None if it has no rope_parameters."""
    older = dict(config)
    parameters = older.pop("rope_parameters", None)
    if parameters is None:
        return None
    if "full_attention" in parameters:
        older["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    parameters = dict(parameters)
    neox = config["model_type"] == "gpt_neox"
    older["rotary_emb_base" if neox else "rope_theta"] = parameters.pop("rope_theta")
    if (share := parameters.pop("partial_rotary_factor", None)) is not None:
        older["rotary_pct" if neox else "partial_rotary_factor"] = share
    older["rope_scaling"] = None if parameters.get("rope_type") == "default" else parameters
    return older


def edits(config: Mapping[str, Any]) -> Iterator[Edit]:
    """Every key deleted, nulled and changed, also those of sections, and keys added that the config lacks."""
    for path, value in _keys(config):
        if path[-1] != "model_type":
            yield path, DELETED
            yield path, None
            for other in _others(value):
                yield path, other
    for key, values in ADDED.items():
        if key not in config:
            yield from (((key,), value) for value in values)


def _keys(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        yield (*above, key), value
        if isinstance(value, dict) and key not in ("id2label", "label2id"):
            yield from _keys(value, (*above, key))


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, "no"]
    if isinstance(value, int):
        return [value + 1, value - 1, 2 * value, 0, -1, float(value), 2.5]
    if isinstance(value, float):
        return [value * 2, value + 1, 0.0, -value, 3]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    if isinstance(value, list):
        return [[], value[:-1], value[::-1], [*value[:-1], value[0]] if value else [1]]
    if isinstance(value, dict):
        return [{}, [1]]
    return [1, 2, True, False, 0.5, "yarn", [1]]


def edited(config: Mapping[str, Any], edit: Edit) -> dict[str, Any]:
    """The config with one edit."""
    out = deepcopy(dict(config))
    (*above, key), value = edit
    section = out
    for name in above:
        section = section[name]
    if value is DELETED:
        section.pop(key)
    else:
        section[key] = value
    return out


def outcome(base: Base, edit: Edit) -> str:
    """What an edit leads to: refused, equal, wrong, only weft (transformers refuses it), or the exception."""
    base = replace(base, config=edited(base.config, edit))
    (base.folder / "config.json").write_text(json.dumps(base.config))
    try:
        ours = logits(weft.from_hf(str(base.folder)), base, ours=True)
    except JobError as error:
        return "refused" if "\n" not in str(error) else "a refusal of several lines"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"
    try:
        cls = getattr(transformers, base.kind)
        model, report = cls.from_pretrained(base.folder, output_loading_info=True)
        theirs = logits(model.eval(), base, ours=False)
    except Exception as error:
        return f"only weft ({type(error).__name__}: {str(error)[:200]!r})"
    if ours.shape == theirs.shape and (ours - theirs).abs().max() <= TOLERANCE * (1 + theirs.abs().max()):
        return "equal"
    missing = {n for n in report["missing_keys"] if "pooler" not in n}
    return f"wrong{' (transformers lacks ' + ', '.join(sorted(missing)[:2]) + ')' if missing else ''}"


@torch.no_grad()
def logits(model: Any, base: Base, ours: bool) -> Tensor:
    """Logits, or the last hidden states of classes without a head."""
    type_of, out = base.config["model_type"], None
    if type_of == "clip":
        image, text = (base.config.get(f"{name}_config") or {} for name in ("vision", "text"))
        side, end = image.get("image_size", 224), text.get("eos_token_id", 2)
        shape = (2, image.get("num_channels", 3), side, side)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        tokens = TOKENS.clone()
        tokens[:, -1] = end if end != 2 else VOCAB - 1
        out = model.logits(images, tokens) if ours else model(input_ids=tokens, pixel_values=images).logits_per_image
    elif type_of == "vit":
        size = base.config.get("image_size", 224)
        sides = (size, size) if isinstance(size, int) else size
        images = torch.randn(2, base.config.get("num_channels", 3), *sides, generator=torch.Generator().manual_seed(2))
        features = base.kind == "ViTModel"
        out = model(images, features=features) if ours else model(images)
        out = out if ours else out.last_hidden_state if features else out.logits
    elif type_of == "t5":
        answer = TOKENS[:, :9].flip(1)
        out = model(TOKENS, decoder_inputs=answer) if ours else model(TOKENS, decoder_input_ids=answer).logits
    elif type_of == "bert":
        features = base.kind == "BertModel"
        out = model(TOKENS, types=TYPES, features=features) if ours else model(TOKENS, token_type_ids=TYPES)
        out = out if ours else out.last_hidden_state if features else out.logits
    else:
        out = model(TOKENS) if ours else model(TOKENS).logits
    assert isinstance(out, Tensor)
    return out
