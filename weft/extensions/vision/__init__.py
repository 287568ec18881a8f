"""Images: their files and augmentation, ViT, ResNet, and CLIP with texts.

Registers the families vit, resnet and clip, the sources of images and of images with captions, and the layouts of
towers (parallel.towers).
"""

from weft.data.source_kinds import SOURCES, SourceKind
from weft.job.model import FAMILIES, STRUCTURES, Family, Structure
from weft.parallel.spreaders import SPREADERS, Spreader

PACKAGE = __name__

STRUCTURES.register(
    Structure("classifier", "Image patches, blocks of an encoder, one label a sample.", "patches", "label")
)
for family in (
    Family(
        "vit", "An encoder of image patches.", "weft.models.transformer:Transformer", "classifier",
        dict(
            norm="layernorm", norm_eps=1e-6, positions="learned", activation="gelu", tied=False, bias=True,
            qk_norm=False, causal=False, dropout=0.0, rope_theta=10_000.0,
        ),
    ),
    Family(
        "resnet", "ResNet of 18, 34, 50, 101 or 152 layers.", f"{PACKAGE}.resnet:ResNet", "module", {},
        args=f"{PACKAGE}.resnet_depths:resnet_args", fields=("layers", "channels"),
    ),
    Family(
        "clip", "CLIP: an image and a text encoder with a contrastive loss.", f"{PACKAGE}.clip.clip:ImageText",
        "module", dict(loss="contrastive", dim=512, activation="gelu_exact"),
        args=f"{PACKAGE}.clip.clip_arguments:clip_args", has_towers=True,
        fields=("dim", "image", "channels", "activation", "norm_eps", "towers"),
    ),
):  # fmt: skip
    FAMILIES.register(family)

SOURCES.register(
    SourceKind(
        "images", f"{PACKAGE}.image_dataset:reads_images", f"{PACKAGE}.image_dataset:open_images",
        ("mnist", "fashion-mnist"), f"{PACKAGE}.idx_files:is_local",
    )
)  # fmt: skip
SOURCES.register(
    SourceKind(
        "captions",
        f"{PACKAGE}.clip.image_captions:reads_captions",
        f"{PACKAGE}.clip.image_captions:open_image_captions",
    )
)
SPREADERS.register(
    Spreader("towers", lambda model, plan: bool(plan.towers), spread=f"{PACKAGE}.clip.spread_towers:spread_towers")
)
