"""Tiny random models of transformers, saved as their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers.lazy_module import LazyModule

transformers: Any = LazyModule("transformers")
VOCAB = 53
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
ROPE = {"rope_theta": 10_000.0}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
_WINDOWS = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama with every option": lambda: transformers.LlamaConfig(
        **SIZES, head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters={**ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 16},
    ),
    "llama with yarn": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "llama with linear scaling": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={**ROPE, "rope_type": "linear", "factor": 4.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=12),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=8, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "num_key_value_heads": 1}, head_dim=12, sliding_window=6, layer_types=_WINDOWS,
        query_pre_attn_scalar=20,
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES, sliding_window=7),
    "phi3 with longrope": lambda: transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=8,
        rope_parameters={**ROPE, "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2],
                         "long_factor": [1.0, 2.0, 3.0], "original_max_position_embeddings": 8,
                         "partial_rotary_factor": 0.75},
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}, hidden_act="relu",
        rope_parameters={**ROPE, "rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=None, topk_method="group_limited_greedy", n_group=2, topk_group=1, n_shared_experts=2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **LATENT, q_lora_rank=12, n_group=2, topk_group=1, n_shared_experts=1, num_mtp_layers=0,
        rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                         "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2}, head_dim=6, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=5, swiglu_limit=0.7, swiglu_alpha=1.5,
        rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                         "truncate": False},
    ),
    "gpt_oss without biases": lambda: transformers.GptOssConfig(
        **{**SIZES, "num_key_value_heads": 1}, head_dim=6, num_local_experts=3, num_experts_per_tok=1, sliding_window=4,
        attention_bias=False, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""Configs by family, with options of which a default would hide a mistake."""

_BERT: dict[str, Any] = {
    **{k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "vocab_size": VOCAB, "max_position_embeddings": 64, "type_vocab_size": 3, "num_labels": 5,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_heads": 4, "num_layers": 2,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
}  # fmt: skip
_VIT: dict[str, Any] = {
    **{k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "num_labels": 7,
}  # fmt: skip
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXTS = {**_TOWER, "vocab_size": VOCAB, "max_position_embeddings": 12, "projection_dim": 24}
ENCODERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bert": ("BertForMaskedLM", lambda: transformers.BertConfig(**_BERT)),
    "bert without head": ("BertModel", lambda: transformers.BertConfig(**_BERT, hidden_act="relu")),
    "bert-classes": ("BertForSequenceClassification", lambda: transformers.BertConfig(**_BERT)),
    "t5": ("T5ForConditionalGeneration", lambda: transformers.T5Config(**_T5)),
    "t5 v1.1": (
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(
            **_T5, num_decoder_layers=3, feed_forward_proj="gated-gelu", tie_word_embeddings=False
        ),
    ),
    "vit": ("ViTForImageClassification", lambda: transformers.ViTConfig(**_VIT, image_size=12, patch_size=4)),
    "vit with odd sizes": (
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(
            **_VIT, image_size=(23, 17), patch_size=5, num_channels=2, qkv_bias=False, hidden_act="quick_gelu",
            layer_norm_eps=1e-3,
        ),
    ),
    "vit without head": (
        "ViTModel", lambda: transformers.ViTConfig(**_VIT, image_size=14, patch_size=3, hidden_act="silu"),
    ),
    "clip": (
        "CLIPModel", lambda: transformers.CLIPConfig(
            text_config={**_TEXTS, "eos_token_id": 2}, vision_config={**_TOWER, "image_size": 12, "patch_size": 4},
            projection_dim=24,
        ),
    ),
    "clip with odd sizes": (
        "CLIPModel", lambda: transformers.CLIPConfig(
            text_config={**_TEXTS, "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 3,
                         "eos_token_id": 7, "hidden_act": "gelu", "layer_norm_eps": 1e-3},
            vision_config={**_TOWER, "image_size": 17, "patch_size": 5, "num_channels": 2, "hidden_act": "gelu",
                           "layer_norm_eps": 1e-3, "num_hidden_layers": 1},
            projection_dim=10, logit_scale_init_value=5.0,
        ),
    ),
}  # fmt: skip
"""The class of transformers and the config of models that are no decoders."""


def save_random(name: str, folder: Path, shard: str = "5GB", dtype: torch.dtype = torch.float32) -> Any:
    """Save a random model of CONFIGS or ENCODERS and return it."""
    kind, config = ENCODERS.get(name) or ("AutoModelForCausalLM", CONFIGS[name])
    return save_config(config(), folder, shard, dtype, kind)


def save_config(
    config: Any,
    folder: Path,
    shard: str = "5GB",
    dtype: torch.dtype = torch.float32,
    kind: str = "AutoModelForCausalLM",
) -> Any:
    """Save a random model of a config and return it."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    model = (cls.from_config(config) if kind.startswith("Auto") else cls(config)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)  # also biases and norms
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model
