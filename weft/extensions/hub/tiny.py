"""Tiny configs of every causal type of transformers, with all kinds of layers, for proofs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weft.extensions.hub.config import import_transformers
from weft.job.load import parse_job
from weft.job.schema import Job

LAYERS = 4
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "width", "dim_model", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers", "n_layers",
                     "num_encoder_layers", "num_decoder_layers", "num_dense_layers_total", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "n_heads",
                     "encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_global_key_value_heads",
                     "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "dim_head", "global_head_dim", "attention_head_dim", "swa_head_dim",
                     "d_kv"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "dff",
                     "ffn_hidden_size", "shared_expert_intermediate_size", "mlp_dim", "intermediate_size_mlp",
                     "moe_shared_expert_intermediate_size", "shared_intermediate_size", "dense_intermediate_size"), 44),
    **dict.fromkeys(("moe_intermediate_size", "expert_dim", "expert_ffn_hidden_size", "expert_intermediate_size"), 20),
    **dict.fromkeys(("vocab_size", "n_vocab", "n_words"), 67),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions",
                     "max_source_positions", "seq_length"), 64),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "n_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
                     "moe_top_k"), 2),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size", "local_window_size",
                     "window_size", "sliding_window_size"), 8),
    "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "qk_head_dim": 12, "n_group": 1, "topk_group": 1, "num_expert_group": 1, "first_k_dense_replace": 1,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8, "n_groups": 1,
    "mamba_expand": 2, "time_step_rank": 4, "mamba_dt_rank": 4, "conv_kernel": 4, "chunk_size": 8,
    "mamba_chunk_size": 8, "n_mamba_heads": 2, "mamba_headdim": 16, "mamba_ngroups": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "lru_width": 32, "attention_hidden_size": 32, "index_head_dim": 8, "index_n_heads": 4, "index_topk": 4,
    "image_size": 16, "patch_size": 8, "num_channels": 3, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 67, "type_vocab_size": 2, "embedding_size": 32, "rotary_dim": 4,
    "n_shared_experts": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "sep_token_id": 2, "image_token_id": 60, "audio_token_id": 61, "video_token_id": 62, "boi_token_id": 63,
    "eoi_token_id": 64, "image_token_index": 60, "num_nextn_predict_layers": 0, "o_lora_rank": 8, "o_groups": 2,
    "altup_num_inputs": 2, "laurel_rank": 4, "num_kv_shared_layers": 0, "ngram": 2, "axial_pos_shape": [4, 4],
    "axial_pos_embds_dim": [8, 24], "num_shared_experts": 1, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    "mlp_lora_rank": 4, "adapter_rank": 4, "num_mem_blocks": 1, "dim_model_base": 32, "rwkv_head_size": 8,
    "mtp_num_hidden_layers": 0, "num_mtp_layers": 0, "position_bias_max_distance": 16, "position_bias_num_buckets": 8,
}  # fmt: skip
"""Values of the fields of configs, by name."""
NEEDED = {
    "num_experts_per_tok",
    "num_local_experts",
    "n_routed_experts",
    "n_group",
    "topk_group",
    "num_key_value_heads",
    "n_shared_experts",
}
"""Fields that get a value where the default is none."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in ("axk2", "deepseek_v32", "glm_moe_dsa")},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"model_type": "", "kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"model_type": "", "ffn_hidden_size": 44, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2}, "mamba2": {"head_dim": 16},
    "xlnet": {"d_head": 8}, "xmod": {"default_language": "en_XX"}, "zaya": {"num_experts_per_tok": 1},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16}, "zamba2": {"n_mamba_heads": 4},
}  # fmt: skip
"""Values of single types."""


def causal_types() -> list[str]:
    """The model types of transformers that continue text."""
    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_args(kind: str) -> dict[str, Any]:
    """The fields of a tiny config of a type, as model.args takes them."""
    from weft.extensions.hub.model import quiet

    transformers = import_transformers()
    with quiet():
        whole = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    return {**_tiny(whole), **OVERRIDES.get(kind, {}), "model_type": kind}


def _tiny(values: Mapping[str, Any]) -> dict[str, Any]:
    count = next((values[n] for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if values.get(n)), None)
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key == "per_layer_config" and isinstance(value, Mapping):
            made[key] = _by_kind(value, values.get("layer_types") or [])
            continue
        if key in ("transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path"):
            continue
        if isinstance(value, Mapping) and (key.endswith("config") or "model_type" in value):
            made[key] = _tiny(value)
        elif key in SIZES and (value is not None or key in NEEDED) and not isinstance(value, bool | Mapping):
            small = SIZES[key]
            made[key] = [small] * len(value) if isinstance(value, list) and not isinstance(small, list) else small
            if isinstance(value, list) and len(value) == count:
                made[key] = [small] * LAYERS
        elif isinstance(value, list) and len(value) == count:
            made[key] = _all_kinds(value)
        else:
            made[key] = value
    if "head_dim" in made and values.get("head_dim") == values.get("qk_rope_head_dim"):
        made["head_dim"] = SIZES["qk_rope_head_dim"]
    return made


def _by_kind(values: Mapping[str, Any], kinds: list[Any]) -> dict[str, Any]:
    """The settings of single layers, for the layers of the short list that are of their kind."""
    made = {}
    for i, kind in enumerate(_all_kinds(kinds) if kinds else ()):
        if (found := values.get(str(kinds.index(kind)))) is not None:
            made[str(i)] = _tiny(found)
    return made


def _all_kinds(values: list[Any]) -> list[Any]:
    """A short list with every kind of value, in the order of the long one."""
    kinds = list({json.dumps(v): v for v in values}.values())
    return (kinds * LAYERS)[:LAYERS]


def tiny_job(args: Mapping[str, Any]) -> Job:
    """A job that trains a tiny model of a few tokens."""
    return parse_job({
        "model": {"family": "transformers", "args": dict(args)}, "data": {"source": "synthetic", "seq_len": 16},
        "train": {"global_batch": 4, "accumulation": 2, "steps": 4},
    })  # fmt: skip
