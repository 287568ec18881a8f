"""The rotary positions of a config.json: rope_theta with rope_scaling, or rope_parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.extensions.pretrained.config_fields import Config, Fields
from weft.job.schema import Model

_KEYS = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low_freq", "high_freq_factor": "high_freq",
        "original_max_position_embeddings": "original_len",
    },
    "yarn": {
        "factor": "factor", "original_max_position_embeddings": "original_len", "beta_fast": "beta_fast",
        "beta_slow": "beta_slow", "attention_factor": "attention_factor", "truncate": "truncate",
    },
    "longrope": {
        "factor": "factor", "original_max_position_embeddings": "original_len", "short_factor": "short_factors",
        "long_factor": "long_factors", "attention_factor": "attention_factor",
    },
}  # fmt: skip
"""By rope_type, the keys that it has and the fields of model.rope_scaling that they set."""
_NEEDED = {
    "linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",), "longrope": ("short_factor", "long_factor"),
}  # fmt: skip
"""By rope_type, the keys without which transformers does not build a model; the factor of yarn may be null."""
_ALIASES = {"su": "longrope"}
_MSCALES = ("mscale", "mscale_all_dim")
"""Keys of yarn that set the attention factor if a config does not give it."""
_LENGTHS = "max_position_embeddings"


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `theta_key` and `share_key` are the names under which older configs have them."""

    theta_key: str = "rope_theta"
    share: float = 1.0
    """Rotated share of a head, if a config does not give it."""
    share_key: str = "partial_rotary_factor"
    partial: bool = False
    """Whether models of the family can rotate a part of a head."""
    kinds: tuple[str, ...] = tuple(_KEYS)
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """Scaling of a config whose rope_parameters are null or left out."""

    def read(self, config: Config) -> Fields:
        parameters = given_parameters(config, self.scaling)
        theta = read_theta(config, parameters, config.take(self.theta_key, default_theta(config)))
        share = parameters.get("partial_rotary_factor", config.take(self.share_key, self.share))
        out: Fields = {"positions": "rope", "rope_theta": theta, **read_scaling(config, parameters)}
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise config.wrong(self.share_key, share, "a share above 0 and up to 1")
        if share != 1 and not self.partial:
            raise config.wrong(self.share_key, share, "1")
        kind = out.get("rope_scaling", {}).get("kind", "default")
        if kind not in self.kinds:
            raise config.wrong("rope_scaling type", kind, " or ".join(self.kinds))
        if share != 1:
            width = config.take("head_dim") or config.number("hidden_size") // config.number("num_attention_heads")
            out["rope_dim"] = int(width * share)
        check_factors(config, out)
        return out

    def write(self, model: Model) -> Fields:
        """Under the keys of transformers 5, rope_parameters, and of the versions before it."""
        share = (model.rope_dim or model.head_dim or 1) / (model.head_dim or 1)
        out: Fields = {self.theta_key: model.rope_theta}
        parameters: Fields = {"rope_type": "default", "rope_theta": model.rope_theta}
        if self.share != 1 or share != 1:
            out[self.share_key] = parameters["partial_rotary_factor"] = share
        scaling = write_scaling(model).get("rope_scaling")
        if scaling:
            parameters = out["rope_scaling"] = parameters | scaling
        return out | _written_length(model) | {"rope_parameters": parameters}


def given_parameters(config: Config, default: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_scaling of older configs, else rope_parameters."""
    parameters, scaling = config.take("rope_parameters"), config.take("rope_scaling")
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise config.wrong(key, value, "an object")
    return scaling or (default if parameters is None else parameters)


def default_theta(config: Config) -> Any:
    """The base of the rotary positions of a config that has none: that of the model type, else 10,000."""
    entry = config.declared.get("default_theta")
    return entry.value if entry else 10_000.0


def read_theta(config: Config, parameters: Mapping[str, Any], outer: Any) -> float:
    """The base in `parameters`, else `outer`, that beside them."""
    theta = parameters.get("rope_theta", outer)
    if type(theta) not in (int, float):
        raise config.wrong("rope_theta", theta, "a number")
    return theta


def read_scaling(config: Config, found: Mapping[str, Any]) -> Fields:
    """model.rope_scaling from rope_scaling or rope_parameters; nothing where positions are not scaled."""
    kind = found.get("rope_type", found.get("type", "default"))
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _KEYS:
        raise config.wrong("rope_scaling type", kind, " or ".join(_KEYS))
    known = _KEYS[kind]
    others = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *known, *(_MSCALES if kind == "yarn" else ())}
    for key, value in found.items():
        if key not in others and value is not None and not (kind == "default" and key == "factor"):
            raise config.wrong(f"rope_scaling {key}", value, f"only {', '.join(known)} with rope_type {kind}")
    if kind == "default":
        return {}
    for key in _NEEDED[kind]:
        if key not in found or (found[key] is None and (kind, key) != ("yarn", "factor")):
            raise config.wrong(f"rope_scaling {key}", found.get(key), f"a value with rope_type {kind}")
    fields = {name: found[key] for key, name in known.items() if found.get(key) is not None}
    if "truncate" in known and "truncate" in found:
        fields["truncate"] = bool(found["truncate"])  # null is false
    longest = config.take(_LENGTHS)
    if kind == "dynamic":
        fields["original_len"] = config.number(_LENGTHS)
    if "original_len" in known.values():  # outside of the scaling it has priority, as in transformers
        outer = config.take("original_max_position_embeddings")
        fields["original_len"] = fields.get("original_len", longest) if outer is None else outer
    if "factor" not in fields and longest and fields.get("original_len"):
        factor = longest / fields["original_len"]
        fields["factor"] = max(1.0, factor) if kind == "longrope" else factor  # there it scales only the attention
    scales = [found.get(key) or 0 for key in _MSCALES]
    if not all(type(scale) in (int, float) and 0 <= scale < 100 for scale in scales):
        raise config.wrong("rope_scaling mscale", scales, "numbers from 0")
    if kind == "yarn" and all(scales) and "attention_factor" not in fields:
        above, below = (_yarn_factor(fields.get("factor", 1.0), scale) for scale in scales)
        fields["attention_factor"] = above / below
    return {"rope_scaling": {"kind": kind, **fields}}


def check_factors(config: Config, fields: Fields) -> None:
    """Refuse longrope whose factors are not one for each pair of rotated values."""
    scaling = fields.get("rope_scaling", {})
    width = fields.get("rope_dim") or config.take("head_dim")
    width = width or config.number("hidden_size") // config.number("num_attention_heads")
    for key, name in (("short_factor", "short_factors"), ("long_factor", "long_factors")):
        factors = scaling.get(name)
        if factors is not None and (not isinstance(factors, list) or len(factors) != width // 2):
            raise config.wrong(f"rope_scaling {key}", factors, f"a list of {width // 2} numbers")


def write_scaling(model: Model) -> Fields:
    """rope_scaling of a config; nothing where positions are not scaled."""
    scaling = model.rope_scaling
    if scaling is None or scaling.kind not in _KEYS:
        return {}
    known = {key: getattr(scaling, name) for key, name in _KEYS[scaling.kind].items()}
    known = {k: list(v) if isinstance(v, tuple) else v for k, v in known.items() if v is not None}
    return {"rope_scaling": {"rope_type": scaling.kind, **known}}


def _written_length(model: Model) -> Fields:
    """max_position_embeddings where dynamic scaling begins, which reads no other key."""
    scaling = model.rope_scaling
    return {_LENGTHS: scaling.original_len} if scaling and scaling.kind == "dynamic" else {}


@dataclass(frozen=True)
class LatentRope:
    """Rotary positions of DeepSeek: a part of each head, scaled by yarn with factors of its own on the attention."""

    def read(self, config: Config) -> Fields:
        scaling = given_parameters(config, {})
        theta = read_theta(config, scaling, config.take("rope_theta", default_theta(config)))
        rope, plain = config.number("qk_rope_head_dim"), config.number("qk_nope_head_dim")
        for key, width in (("head_dim", rope), ("qk_head_dim", rope + plain)):
            config.take(key)
            if key in config.raw and config.raw[key] != width:  # they repeat the others
                raise config.wrong(key, config.raw[key], str(width))
        out: Fields = {"positions": "rope", "rope_theta": theta, "rope_dim": rope, "head_dim": rope + plain}
        of_all = scaling.get("mscale_all_dim") or 0
        out |= read_scaling(config, scaling)
        if found := out.get("rope_scaling"):
            if found["kind"] != "yarn":
                raise config.wrong("rope_scaling type", found["kind"], "default or yarn")
            if of_all:
                out["attention_scale"] = (rope + plain) ** -0.5 * _yarn_factor(found["factor"], of_all) ** 2
        return out

    def write(self, model: Model) -> Fields:
        rope = model.rope_dim or 0
        out: Fields = {
            "rope_theta": model.rope_theta, "qk_rope_head_dim": rope, "qk_nope_head_dim": (model.head_dim or 0) - rope,
        }  # fmt: skip
        scaling = write_scaling(model).get("rope_scaling")
        if scaling and model.attention_scale and model.head_dim:
            factor = model.attention_scale**0.5 * model.head_dim**0.25  # 0.1 · mscale_all_dim · ln(factor) + 1
            scaling["mscale_all_dim"] = (factor - 1) / (0.1 * math.log(scaling["factor"]))
        return out | ({"rope_scaling": scaling} if scaling else {})


def _yarn_factor(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class OriginalLength:
    """The length of the original training, which Phi-3's configs have outside of rope_scaling."""

    def read(self, config: Config) -> Fields:
        config.take("original_max_position_embeddings")
        return {}

    def write(self, model: Model) -> Fields:
        return {"original_max_position_embeddings": model.rope_scaling.original_len if model.rope_scaling else None}


@dataclass(frozen=True)
class LocalRope:
    """Rotary positions with another base in blocks that have a sliding window (Gemma 3)."""

    def read(self, config: Config) -> Fields:
        parameters, older = config.take("rope_parameters") or {}, config.take("rope_scaling") or {}
        if not isinstance(parameters, dict) or any(type(v) not in (dict, type(None)) for v in parameters.values()):
            raise config.wrong("rope_parameters", parameters, "full_attention and sliding_attention")
        if not isinstance(older, dict) or (older and "rope_type" not in older):  # transformers does not read `type`
            raise config.wrong("rope_scaling", older, "an object with rope_type")
        unscaled, bases = {"rope_type": "default"}, default_theta(config)
        scaling = {**(parameters.get("full_attention") or unscaled), **older}
        local = parameters.get("sliding_attention") or unscaled
        theta = read_theta(config, scaling, config.take("rope_theta", bases["global"]))
        window_theta = read_theta(config, local, config.take("rope_local_base_freq", bases["local"]))
        if read_scaling(config, local):
            raise config.wrong("rope_parameters sliding_attention", local, "unscaled positions")
        out = {"positions": "rope", "rope_theta": theta, "window_theta": window_theta, **read_scaling(config, scaling)}
        check_factors(config, out)
        return out

    def write(self, model: Model) -> Fields:
        out = {"rope_theta": model.rope_theta, "rope_local_base_freq": model.window_theta}
        return out | write_scaling(model) | _written_length(model)
