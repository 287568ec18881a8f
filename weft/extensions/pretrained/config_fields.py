"""How keys of a config.json become fields of `model`, and back. Does not need torch.

A family lists converters. Each takes the keys that it knows from a config; a key that no converter takes and that is
not known to leave the function of the model unchanged is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.extensions.pretrained.config_defaults import KeyDefault, defaults_of
from weft.job.errors import JobError
from weft.job.schema import Model

Fields = dict[str, Any]

IGNORED_KEYS = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation_internal", "_name_or_path", "architectures", "attention_dropout",
    "attention_probs_dropout_prob", "attn_pdrop", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "classifier_dropout", "diversity_penalty", "do_sample",
    "dropout_rate", "dtype", "early_stopping",
    "embd_pdrop", "embedding_dropout", "eos_token_id", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "id2label",
    "initializer_factor", "initializer_range", "is_decoder", "is_encoder_decoder",
    "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "min_length", "model_type",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "repetition_penalty",
    "resid_pdrop",
    "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "sep_token_id", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    "use_return_dict",
))  # fmt: skip
"""Keys that do not change the logits of a model: token ids, dropout, defaults of generation, bookkeeping."""

NULL_KEYS = frozenset(("q_lora_rank", "sliding_window"))
"""Keys that are null in a model without the feature; left out, they have a default of the family."""


MAX_LAYERS = 10_000


class Config:
    """The keys of a config.json, of which converters take what they know. `kind` is the model_type whose class in
    transformers has the defaults and types of its keys."""

    def __init__(self, raw: Mapping[str, Any], where: str, kind: str):
        self.raw, self.where, self.declared = dict(raw), where, defaults_of(kind)
        self.taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which may be null; left out, its default in transformers, or `default` if transformers
        declares none. A value that transformers' class does not take is refused."""
        value, entry = self._value(key, default), self.declared.get(key)
        if key in self.raw and entry is not None and not entry.takes(value):
            raise self.wrong(key, value, entry.expected)
        return value

    def _value(self, key: str, default: Any) -> Any:
        self.taken.add(key)
        return self.raw[key] if key in self.raw else self.declared.get(key, KeyDefault(default)).value

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; lists are made of numbers of layers."""
        found, most = self._value(key, default), MAX_LAYERS if "layer" in key else 2**31
        if type(found) is not int or not 0 < found <= most:
            raise self.wrong(key, found, f"a whole number above 0{f' and at most {most}' if most < 2**31 else ''}")
        return found

    def wrong(self, key: str, value: Any, expected: str) -> JobError:
        return JobError(f"{self.where} has {key}={_short(value)}; Weft needs {expected}")

    def check_all_taken(self) -> None:
        """Refuse keys that nothing has taken, since they may change what the model computes."""
        for key, value in self.raw.items():
            if key not in self.taken and key not in IGNORED_KEYS and value not in (None, False, [], {}, ""):
                raise JobError(
                    f"{self.where} has {key}={_short(value)}, which Weft does not support for this family of models"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Converter(Protocol):
    """Reads some fields of a model from a config, and writes them to one."""

    def read(self, config: Config) -> Fields: ...

    def write(self, model: Model) -> Fields: ...


@dataclass(frozen=True)
class Key:
    """One field under one key."""

    name: str
    key: str
    default: Any = None
    """That of a key which transformers' config class does not declare."""

    def read(self, config: Config) -> Fields:
        value = config.take(self.key, self.default)
        return {} if value is None else {self.name: value}

    def write(self, model: Model) -> Fields:
        return {self.key: getattr(model, self.name)}


@dataclass(frozen=True)
class SizeKey(Key):
    """A whole number above 0."""

    def read(self, config: Config) -> Fields:
        return {self.name: config.number(self.key, self.default)}


@dataclass(frozen=True)
class Flags:
    """One key that sets several fields."""

    names: tuple[str, ...]
    key: str

    def read(self, config: Config) -> Fields:
        return dict.fromkeys(self.names, bool(config.take(self.key, False)))

    def write(self, model: Model) -> Fields:
        return {self.key: bool(getattr(model, self.names[0]))}


@dataclass(frozen=True)
class Choice:
    """A key whose values are those of a field under other names; the first of them is written."""

    name: str
    key: str
    values: Mapping[str, str]

    def read(self, config: Config) -> Fields:
        found = config.take(self.key)
        if not isinstance(found, str) or found not in self.values:
            raise config.wrong(self.key, found, " or ".join(self.values))
        return {self.name: self.values[found]}

    def write(self, model: Model) -> Fields:
        value = getattr(model, self.name)
        return {self.key: next((k for k, v in self.values.items() if v == value), None)}


@dataclass(frozen=True)
class Only:
    """A key of which Weft supports some values; they need no field. The first is the default of a key that
    transformers' config class does not declare."""

    key: str
    values: tuple[Any, ...]

    def read(self, config: Config) -> Fields:
        found = config.take(self.key, self.values[0])
        if not any(found == value and (type(found) is bool) == (type(value) is bool) for value in self.values):
            raise config.wrong(self.key, found, " or ".join(map(repr, self.values)))
        return {}

    def write(self, model: Model) -> Fields:
        return {} if self.values[0] is None else {self.key: self.values[0]}


@dataclass(frozen=True)
class Without:
    """Keys without an effect of their own: others repeat them, or they change only rounding."""

    keys: tuple[str, ...]

    def read(self, config: Config) -> Fields:
        config.taken.update(self.keys)
        return {}

    def write(self, model: Model) -> Fields:
        return {}


@dataclass(frozen=True)
class Fixed:
    """Fields that every model of the family has."""

    fields: Mapping[str, Any]

    def read(self, config: Config) -> Fields:
        return dict(self.fields)

    def write(self, model: Model) -> Fields:
        return {}


@dataclass(frozen=True)
class HeadWidth:
    """The width of a head: head_dim, else hidden_size / num_attention_heads."""

    def read(self, config: Config) -> Fields:
        if (given := config.take("head_dim")) is not None:
            if type(given) is not int or given <= 0:
                raise config.wrong("head_dim", given, "a whole number above 0")
            return {"head_dim": given}
        dim, heads = config.number("hidden_size"), config.number("num_attention_heads")
        if dim % heads:
            raise JobError(f"{config.where}: hidden_size={dim} is not a multiple of num_attention_heads={heads}")
        return {"head_dim": dim // heads}

    def write(self, model: Model) -> Fields:
        return {"head_dim": model.head_dim}


DefaultLayers = Callable[[Config, int], list[int]]
"""Blocks with the sliding window, where a config does not list them."""


def every_layer(config: Config, layers: int) -> list[int]:
    return list(range(layers))


@dataclass(frozen=True)
class Windows:
    """The sliding window and the blocks that have it."""

    switch: str | None = None
    """A key without which there is no window."""
    layers: DefaultLayers = every_layer
    listed: bool = True
    """Whether the config can list the kind of each block."""

    def read(self, config: Config) -> Fields:
        window, count = config.take("sliding_window"), config.number("num_hidden_layers")
        on = self.switch is None or bool(config.take(self.switch, False))
        kinds = config.take("layer_types") if self.listed else None
        chosen = self.layers(config, count)
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != count:
                raise config.wrong("layer_types", kinds, f"a list of {count} kinds")
            for kind in kinds:
                if kind not in ("full_attention", "sliding_attention"):
                    raise config.wrong("layer_types", kind, "full_attention or sliding_attention")
            chosen = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        if not on or not window or not chosen:
            return {}
        if type(window) is not int or window < 0:
            raise config.wrong("sliding_window", window, "a whole number above 0")
        return {"window": window} | ({} if len(chosen) == count else {"window_layers": chosen})

    def write(self, model: Model) -> Fields:
        assert model.layers
        out: Fields = {"sliding_window": model.window}
        if self.switch:
            out[self.switch] = model.window is not None
        if self.listed:
            sliding = [model.has_window(i) for i in range(model.layers)]
            out["layer_types"] = ["sliding_attention" if s else "full_attention" for s in sliding]
        return out


@dataclass(frozen=True)
class ExpertKeys:
    """A mixture of experts; `keys` maps fields of `model.experts` to keys of the config."""

    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    other_keys: Mapping[str, str] = field(default_factory=dict)
    """By field, another key under which newer configs have it."""

    def read(self, config: Config) -> Fields:
        values = {n: config.take(key) for n, key in self.keys.items()}
        values |= {n: config.take(key, values[n]) for n, key in self.other_keys.items()}
        for name, value in values.items():
            if value is None and name != "renormalize":  # null is false there
                raise config.wrong(self.keys[name], value, "a whole number")
        if "renormalize" in values:
            values["renormalize"] = bool(values["renormalize"])
        return {"experts": {"balance": "none", **self.fixed, **values}}

    def write(self, model: Model) -> Fields:
        if model.experts is None:
            return {}
        return {key: getattr(model.experts, n) for n, key in self.keys.items()}
