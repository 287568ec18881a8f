"""The built-in model families. A new one is an entry here, or in a module of a job's `extensions`."""

from __future__ import annotations

from weft.job.model import FAMILIES, Family

for entry in (
    Family(
        "gpt2", "GPT-2: learned positions, layer norm, GELU, tied embedding.", "weft.models.transformer:Transformer",
        "decoder",
        dict(
            norm="layernorm", norm_eps=1e-5, positions="learned", activation="gelu", tied=True, bias=True,
            qk_norm=False, causal=True, dropout=0.0, rope_theta=10_000.0,
        ),
    ),
    Family(
        "llama", "Llama: rotary positions, RMS norm, SwiGLU.", "weft.models.transformer:Transformer", "decoder",
        dict(
            norm="rmsnorm", norm_eps=1e-5, positions="rope", activation="swiglu", tied=False, bias=False,
            qk_norm=False, causal=True, dropout=0.0, rope_theta=500_000.0,
        ),
    ),
    Family(
        "bert", "BERT: an encoder with learned positions, token types and layer norm after each addition.",
        "weft.models.transformer:Transformer", "encoder",
        dict(
            norm="layernorm", norm_eps=1e-12, norm_at="residual", positions="learned", activation="gelu_exact",
            tied=True, bias=True, qk_norm=False, causal=False, dropout=0.0, rope_theta=10_000.0, token_types=2,
        ),
    ),
    Family(
        "t5", "T5: an encoder and a decoder with relative positions, RMS norm, and ReLU or gated GELU.",
        "weft.models.encoder_decoder:EncoderDecoder", "encoder_decoder",
        dict(
            norm="rmsnorm", norm_eps=1e-6, positions="relative", activation="relu", tied=True, bias=False,
            qk_norm=False, causal=True, dropout=0.0, rope_theta=10_000.0, attention_scale=1.0, position_buckets=32,
            position_limit=128,
        ),
    ),
    Family(
        "vit", "An encoder of image patches.", "weft.models.transformer:Transformer", "classifier",
        dict(
            norm="layernorm", norm_eps=1e-6, positions="learned", activation="gelu", tied=False, bias=True,
            qk_norm=False, causal=False, dropout=0.0, rope_theta=10_000.0,
        ),
    ),
    Family(
        "resnet", "ResNet of 18, 34, 50, 101 or 152 layers.", "weft.models.vision.resnet:ResNet", "module", {},
        args="weft.models.vision.resnet_depths:resnet_args", fields=("layers", "channels"),
    ),
    Family(
        "clip", "CLIP: an image and a text encoder with a contrastive loss.", "weft.models.vision.clip:ImageText",
        "module", dict(loss="contrastive", dim=512, activation="gelu_exact"),
        args="weft.models.vision.clip_arguments:clip_args", has_towers=True,
        fields=("dim", "image", "channels", "activation", "norm_eps", "towers"),
    ),
    Family(
        "dlrm", "DLRM: embedding tables, dense features and their dot products.", "weft.models.recommend.dlrm:DLRM",
        "module", dict(loss="bce", dim=16, bottom=(64,), top=(64,)), args="weft.models.recommend.arguments:dlrm_args",
        has_tables=True, fields=("dim", "tables", "table_optim", "dense_features", "bottom", "top"),
    ),
    Family(
        "two_tower", "Two towers, of users and of items, and the dot product of their outputs.",
        "weft.models.recommend.two_tower:TwoTower", "module", dict(loss="bce", dim=16, bottom=(64,)),
        args="weft.models.recommend.arguments:two_tower_args",
        has_tables=True, fields=("dim", "tables", "table_optim", "dense_features", "bottom"),
    ),
    Family(
        "mlp", "The deep MLP of the lessons.", "weft.models.mlp:DeepMLP", "stack", dict(bias=True, dropout=0.0),
        fields=("dim", "layers", "bias", "dropout"),
    ),
):  # fmt: skip
    FAMILIES.register(entry)
