"""The structures and model families of the core. A new one is an entry here, or in a module of a job's `extensions`."""

from __future__ import annotations

from weft.job.model import FAMILIES, STRUCTURES, Family, Structure

for structure in (
    Structure(
        "decoder", "Tokens, blocks of attention and feed-forward, logits for each token.", "tokens", "next token",
        generate="weft.training.generate:continue_prompts",
    ),
    Structure("stack", "Vectors and square linear layers.", "vectors", "vector", needs=("dim", "layers")),
    Structure("module", "A module that trains as a user's would, by replicas and shards.", needs=()),
):  # fmt: skip
    STRUCTURES.register(structure)

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
        "mlp", "The deep MLP of the lessons.", "weft.models.mlp:DeepMLP", "stack", dict(bias=True, dropout=0.0),
        fields=("dim", "layers", "bias", "dropout"),
    ),
):  # fmt: skip
    FAMILIES.register(entry)
