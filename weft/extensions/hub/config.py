"""Configs of transformers: the object of a model_type, and the fields of `model` that it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from weft.extensions.pretrained.checkpoint_folder import CONFIG, existing_folder, find_folder
from weft.job.errors import JobError, MachineError
from weft.job.files.checked_files import read_json
from weft.job.registry import did_you_mean

Config = Any
"""A PreTrainedConfig of transformers."""


def reads(name: str) -> bool:
    """Whether a checkpoint has a config with a model_type: any of them may be one of transformers."""
    folder = existing_folder(name)
    return folder is not None and isinstance(read_json(folder / CONFIG).get("model_type"), str)


def checkpoint_fields(name: str) -> dict[str, Any]:
    """The fields of `model` for a checkpoint: a folder or a name in the hub cache."""
    folder = find_folder(name)
    args = read_json(folder / CONFIG)
    return {"family": "transformers", "args": args} | fields_of_args(args, str(folder / CONFIG))


def fields_of_args(args: Mapping[str, Any], where: str = "model.args") -> dict[str, Any]:
    """The sizes that the planner knows models by, from the fields of a config."""
    return dict(_fields(json.dumps(args, sort_keys=True), where))


@cache
def _fields(text: str, where: str) -> dict[str, Any]:
    config = make_config(json.loads(text), where)
    part = config.get_text_config(decoder=True)

    def number(*names: str) -> int | None:
        for name in names:
            value = getattr(part, name, None)
            value = max(value, default=None) if isinstance(value, list | tuple) else value
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    dim = number("hidden_size", "d_model", "n_embd", "dim")
    layers = number("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers")
    vocab = number("vocab_size")
    if dim is None or layers is None or vocab is None:
        missing = "hidden_size" if dim is None else "num_hidden_layers" if layers is None else "vocab_size"
        raise JobError(f"{where} has no {missing}, by which Weft plans a model of model_type={config.model_type}")
    heads = number("num_attention_heads", "n_head", "decoder_attention_heads", "num_heads") or 1
    kv = number("num_key_value_heads", "num_kv_heads", "multi_query_group_num") or heads
    return {
        "dim": dim, "layers": layers, "vocab": vocab, "heads": heads, "kv_heads": kv if heads % kv == 0 else heads,
        "head_dim": number("head_dim", "kv_channels") or max(1, dim // heads),
        "ffn": number("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "d_ff") or 4 * dim,
        "max_len": number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length") or 2**20,
        "tied": bool(getattr(part, "tie_word_embeddings", False)),
    }  # fmt: skip


def make_config(args: Mapping[str, Any], where: str = "model.args") -> Config:
    """The config object of the installed transformers. Code that a config names is never run."""
    transformers = import_transformers()
    known = transformers.CONFIG_MAPPING
    kind = args.get("model_type")
    if not isinstance(kind, str):
        raise JobError(f"{where} has model_type={kind!r:.80}; give a type of transformers such as qwen3")
    if kind not in known:
        if args.get("auto_map"):
            raise JobError(
                f"{where} has model_type={kind!r:.80}, whose code is in its own folder (auto_map), and Weft runs no "
                "code of a checkpoint; a model_type of the installed transformers would work"
            )
        raise JobError(
            f"{where} has model_type={kind!r:.80}, which transformers {transformers.__version__} does not know"
            f"{did_you_mean(kind, list(known.keys()))}; a newer transformers may (pip install -U transformers)"
        )
    values = {k: _numbers(v) for k, v in args.items() if k not in ("auto_map", "model_type", "transformers_version")}
    try:
        return known[kind].from_dict({**values, "model_type": kind})
    except Exception as error:  # configs check their fields with errors of several kinds
        text = str(error).strip().replace("\n", " ")
        raise JobError(f"{where} is not a config of model_type={kind}: {text}") from None


def _numbers(value: Any) -> Any:
    """Values with the numbers that JSON does not have, as transformers writes them."""
    if isinstance(value, Mapping):
        return (
            float(value["__float__"]) if value.keys() == {"__float__"} else {k: _numbers(v) for k, v in value.items()}
        )
    return [_numbers(v) for v in value] if isinstance(value, list) else value


def import_transformers() -> Any:
    """The package transformers; a MachineError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise MachineError(
            "this model needs transformers, which is not installed; pip install 'weft[hub]' would work"
        ) from None
    return transformers


def causal_class(config: Config) -> Any:
    """The class of transformers with next-token logits for a config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise JobError(
            f"model_type={config.model_type} has no class in transformers that continues text (AutoModelForCausalLM); "
            "train a text model"
        ) from None
    if isinstance(found, tuple):
        names = getattr(config, "architectures", None) or []
        found = next((c for c in found if c.__name__ in names), found[0])
    return found
