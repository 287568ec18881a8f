"""BERT and T5: encoders of texts, alone or with a decoder, and their data.

Registers the families bert and t5 with their structures, and data.format labels and pairs.
"""

from weft.data.source_kinds import SOURCES, SourceKind
from weft.job.model import FAMILIES, STRUCTURES, Family, Structure

PACKAGE = __name__

STRUCTURES.register(
    Structure(
        "encoder", "As a decoder, with attention to both sides, for hidden tokens or one label a sample.", "tokens",
        "hidden token", dataset=f"{PACKAGE}.masked_tokens:with_hidden_tokens",
    )
)  # fmt: skip
STRUCTURES.register(
    Structure(
        "encoder_decoder", "Blocks of an encoder, then blocks of a decoder that also attends to its output.", "tokens",
        "text", generate=f"{PACKAGE}.translate:translate_prompts",
    )
)  # fmt: skip
for family in (
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
        f"{PACKAGE}.encoder_decoder:EncoderDecoder", "encoder_decoder",
        dict(
            norm="rmsnorm", norm_eps=1e-6, positions="relative", activation="relu", tied=True, bias=False,
            qk_norm=False, causal=True, dropout=0.0, rope_theta=10_000.0, attention_scale=1.0, position_buckets=32,
            position_limit=128,
        ),
    ),
):  # fmt: skip
    FAMILIES.register(family)

for name in ("labels", "pairs"):
    file = {"labels": "labeled_texts", "pairs": "text_pairs"}[name]
    SOURCES.register(SourceKind(name, f"{PACKAGE}.{file}:reads", f"{PACKAGE}.{file}:open_{file}"))
