"""Keys of configs and names of tensors of CLIP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.extensions.pretrained.config_fields import Config, Fields, Only, SizeKey, Without
from weft.extensions.pretrained.family_entry import Fused, PretrainedFamily
from weft.extensions.pretrained.family_parts import PLAIN, Names
from weft.job.model_parts.tower_settings import TowerName, TowerShape
from weft.job.schema import Model

_SECTIONS: dict[TowerName, str] = {"image": "vision_config", "text": "text_config"}
_KINDS = {"vision_config": "clip_vision_model", "text_config": "clip_text_model"}
"""By section, the model_type whose defaults it has."""
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_LARGEST = 2
"""The eos_token_id of early configs, whatever the tokenizer: the largest token of a text is its end."""


@dataclass(frozen=True)
class Towers:
    """text_config and vision_config."""

    def read(self, config: Config) -> Fields:
        parts = {name: self._part(config, key) for name, key in _SECTIONS.items()}
        towers = {name: self._shape(part) for name, part in parts.items()}
        image, text = parts["image"], parts["text"]
        side = image.take("image_size")
        if type(side) is not int or not 0 < side <= 65_536:
            raise image.wrong("image_size", side, "a whole number of pixels: images are square")
        towers["image"]["patch"] = image.number("patch_size")
        end = text.take("eos_token_id")
        if type(end) is not int or end < 0:
            raise text.wrong("eos_token_id", end, "one token")
        towers["text"]["end"] = "largest" if end == _LARGEST else end
        out: Fields = {
            "towers": towers, "image": (side, side), "channels": image.number("num_channels"),
            "vocab": text.number("vocab_size"), "max_len": text.number("max_position_embeddings"),
        }  # fmt: skip
        for name, key in (("activation", "hidden_act"), ("norm_eps", "layer_norm_eps")):
            found, other = (part.take(key) for part in (text, image))
            if found != other or (name == "activation" and found not in PLAIN):
                known = f"one of {', '.join(PLAIN)}, " if name == "activation" else ""
                raise image.wrong(key, other, f"{known}the same in both encoders; text_config has {found!r}")
            out[name] = PLAIN[found] if name == "activation" else found
        for part in parts.values():
            Without(("projection_dim", "tie_word_embeddings")).read(part)
            Only("is_decoder", (False,)).read(part)
            part.check_all_taken()
        return out

    def _part(self, config: Config, key: str) -> Config:
        """A section; early configs have another under an older name, which takes its place."""
        sections = {name: config.take(name) for name in (key, f"{key}_dict")}
        for name, section in sections.items():
            if section is not None and not isinstance(section, Mapping):
                raise config.wrong(name, section, "an object")
        older = sections[f"{key}_dict"]
        return Config(older if older is not None else sections[key] or {}, f"{config.where} {key}", _KINDS[key])

    def _shape(self, part: Config) -> Fields:
        dim, layers, heads, ffn = (part.number(key) for key in _SIZES)
        if dim % heads:
            raise part.wrong("hidden_size", dim, f"a multiple of num_attention_heads={heads}")
        return {"dim": dim, "layers": layers, "heads": heads, "ffn": ffn}

    def write(self, model: Model) -> Fields:
        if {*model.towers} != {*_SECTIONS} or not model.image:
            return {}
        activation = next((key for key, value in PLAIN.items() if value == model.activation), None)
        shared = {"hidden_act": activation, "layer_norm_eps": model.norm_eps or 1e-5, "projection_dim": model.dim}
        image, text = ({**shared, **_written_shape(model.towers[name])} for name in _SECTIONS)
        image |= {
            "image_size": model.image[0], "patch_size": model.towers["image"].patch, "num_channels": model.channels,
            "model_type": "clip_vision_model",
        }  # fmt: skip
        end = model.towers["text"].end
        text |= {
            "vocab_size": model.vocab, "max_position_embeddings": model.max_len, "model_type": "clip_text_model",
            "eos_token_id": _LARGEST if end == "largest" else end,
        }  # fmt: skip
        return {"vision_config": image, "text_config": text}


def with_sizes(model: Model, end: int | None) -> Model:
    """A model of towers with the fields that a job may leave to its data; `end` is the last token of its texts."""
    args = model.args
    text = model.towers["text"]
    towers = {**model.towers, "text": text if text.end is not None else text.model_copy(update={"end": end})}
    return model.model_copy(update={
        "towers": towers, "image": (args["side"],) * 2, "channels": args["channels"], "vocab": args["vocab"],
        "max_len": args["context"], "norm_eps": args["eps"],
    })  # fmt: skip


def _written_shape(tower: TowerShape) -> Fields:
    values = (tower.dim, tower.layers, tower.heads, tower.width)
    return dict(zip(_SIZES, values, strict=True))


def _tower(name: str, there: str) -> Names:
    """Names of what both encoders have."""
    block, layer = f"{name}.blocks.{{i}}", f"{there}.encoder.layers.{{i}}"
    return {
        **{f"{block}.attn.{n}.{{p}}": f"{layer}.self_attn.{n}_proj.{{p}}" for n in "qkv"},
        f"{block}.attn.o.{{p}}": f"{layer}.self_attn.out_proj.{{p}}",
        f"{block}.attn_norm.{{p}}": f"{layer}.layer_norm1.{{p}}",
        f"{block}.mlp_norm.{{p}}": f"{layer}.layer_norm2.{{p}}",
        f"{block}.mlp.up.{{p}}": f"{layer}.mlp.fc1.{{p}}",
        f"{block}.mlp.down.{{p}}": f"{layer}.mlp.fc2.{{p}}",
        f"{name}.positions": f"{there}.embeddings.position_embedding.weight",
    }


CLIP: Names = {
    **_tower("image", "vision_model"),
    "image.embed.weight": Fused("vision_model.embeddings.patch_embedding.weight", "patches"),
    "image.class_token": Fused("vision_model.embeddings.class_embedding", "one row"),
    "image.embed_norm.{p}": "vision_model.pre_layrnorm.{p}",
    "image.norm.{p}": "vision_model.post_layernorm.{p}",
    "image.project.weight": "visual_projection.weight",
    **_tower("text", "text_model"),
    "text.tokens.weight": "text_model.embeddings.token_embedding.weight",
    "text.norm.{p}": "text_model.final_layer_norm.{p}",
    "text.project.weight": "text_projection.weight",
    "log_factor": Fused("logit_scale", "one number"),
}
CLIP_FAMILY = PretrainedFamily(
    "clip", "CLIP", "CLIPModel", "clip",
    (SizeKey("dim", "projection_dim"), Towers(), Without(("logit_scale_init_value", "tie_word_embeddings"))),
    CLIP, "", ("*embeddings.position_ids",),
)  # fmt: skip
