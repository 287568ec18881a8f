"""Keys of configs and names of tensors of image models (ViT)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from weft.extensions.pretrained.config_fields import Choice, Config, Fields, Fixed, HeadWidth, Key, SizeKey, Without
from weft.extensions.pretrained.encoder_families import Labels
from weft.extensions.pretrained.family_entry import Fused, PretrainedFamily
from weft.extensions.pretrained.family_parts import PLAIN, Names
from weft.job.errors import JobError
from weft.job.schema import Model


def image_size(model: Model) -> tuple[int, int] | None:
    """Height and width of the images of a model with a class token; without model.image, those of a square one."""
    patches = (model.max_len or 1) - 1
    side = isqrt(patches)
    return model.image or ((side * (model.patch or 4),) * 2 if side * side == patches else None)


@dataclass(frozen=True)
class ImageSize:
    """The size of images and of their patches, which give the number of positions."""

    def read(self, config: Config) -> Fields:
        sizes, patches = self._pair(config, "image_size"), self._pair(config, "patch_size")
        if patches[0] != patches[1]:
            raise config.wrong("patch_size", config.raw["patch_size"], "square patches")
        patch = patches[0]
        if min(sizes) < patch:
            raise JobError(f"{config.where} has image_size={min(sizes)}, which is smaller than patch_size={patch}")
        count = (sizes[0] // patch) * (sizes[1] // patch)
        return {"image": sizes, "patch": patch, "max_len": count + 1}

    def _pair(self, config: Config, key: str) -> tuple[int, int]:
        found = config.take(key)
        pair = tuple(found) if isinstance(found, list | tuple) else (found, found)
        if len(pair) != 2 or any(type(side) is not int or not 0 < side <= 65_536 for side in pair):
            raise config.wrong(key, found, "a whole number of pixels above 0, or two of them")
        return pair

    def write(self, model: Model) -> Fields:
        sizes = image_size(model)
        square = sizes is not None and sizes[0] == sizes[1]
        return {"image_size": sizes and (sizes[0] if square else list(sizes)), "patch_size": model.patch or 4}


_BLOCK, _LAYER = "blocks.{i}", "vit.encoder.layer.{i}"
VIT: Names = {
    "embed.weight": Fused("vit.embeddings.patch_embeddings.projection.weight", "patches"),
    "embed.bias": "vit.embeddings.patch_embeddings.projection.bias",
    "embed.token": Fused("vit.embeddings.cls_token", "one token"),
    "positions.weight": Fused("vit.embeddings.position_embeddings", "one batch"),
    f"{_BLOCK}.attn_norm.{{p}}": f"{_LAYER}.layernorm_before.{{p}}",
    f"{_BLOCK}.attn.q.{{p}}": f"{_LAYER}.attention.attention.query.{{p}}",
    f"{_BLOCK}.attn.k.{{p}}": f"{_LAYER}.attention.attention.key.{{p}}",
    f"{_BLOCK}.attn.v.{{p}}": f"{_LAYER}.attention.attention.value.{{p}}",
    f"{_BLOCK}.attn.o.{{p}}": f"{_LAYER}.attention.output.dense.{{p}}",
    f"{_BLOCK}.mlp_norm.{{p}}": f"{_LAYER}.layernorm_after.{{p}}",
    f"{_BLOCK}.mlp.up.{{p}}": f"{_LAYER}.intermediate.dense.{{p}}",
    f"{_BLOCK}.mlp.down.{{p}}": f"{_LAYER}.output.dense.{{p}}",
    "norm.{p}": "vit.layernorm.{p}",
    "head.{p}": "classifier.{p}",
}

IMAGE_FAMILIES = (
    PretrainedFamily(
        "vit", "ViT", "ViTForImageClassification", "vit",
        (SizeKey("dim", "hidden_size"), SizeKey("layers", "num_hidden_layers"),
         SizeKey("heads", "num_attention_heads"), SizeKey("ffn", "intermediate_size"),
         SizeKey("channels", "num_channels"), HeadWidth(), ImageSize(), Labels("vocab"),
         Key("norm_eps", "layer_norm_eps"), Key("qkv_bias", "qkv_bias"),
         Choice("activation", "hidden_act", PLAIN), Fixed({"class_token": True}),
         Without(("encoder_stride", "pooler_act", "pooler_output_size", "tie_word_embeddings"))),
        VIT, "vit.", ("*pooler.*", "*embeddings.mask_token"), also_reads=("ViTModel",), fresh=("head.*",),
    ),
)  # fmt: skip
