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
        "mlp", "The deep MLP of the lessons.", "weft.models.mlp:DeepMLP", "stack", dict(bias=True, dropout=0.0),
        fields=("dim", "layers", "bias", "dropout"),
    ),
):  # fmt: skip
    FAMILIES.register(entry)
