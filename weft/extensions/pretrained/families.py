"""The built-in families of published checkpoints. A new one is an entry here. Does not need torch."""

from __future__ import annotations

from weft.extensions.pretrained.clip_family import CLIP_FAMILY
from weft.extensions.pretrained.config_fields import (
    Choice,
    Config,
    ExpertKeys,
    Fixed,
    Flags,
    HeadWidth,
    Key,
    Only,
    SizeKey,
    Windows,
    Without,
)
from weft.extensions.pretrained.encoder_families import ENCODER_FAMILIES
from weft.extensions.pretrained.family_entry import PRETRAINED, PretrainedFamily
from weft.extensions.pretrained.family_parts import (
    ATTENTION,
    BOTH_NORMS,
    DEEPSEEK,
    ENDS,
    GPT2,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    MLP,
    NEOX,
    OUT_NORMS,
    PHI3,
    PLAIN,
    QWEN_MOE,
    SIZES,
    Fp8Blocks,
    GemmaScales,
    Gpt2Width,
    GroupsOfExperts,
    KeyHeads,
    LatentKeys,
    Mxfp4Blocks,
    QwenShared,
    SparseLayers,
    llama_like,
)
from weft.extensions.pretrained.image_families import IMAGE_FAMILIES
from weft.extensions.pretrained.rope_config import LatentRope, LocalRope, OriginalLength, Rope


def _after_first(config: Config, layers: int) -> list[int]:
    return [i for i in range(layers) if i >= config.take("max_window_layers")]


def _even_ones(config: Config, layers: int) -> list[int]:
    return [i for i in range(0, layers, 2) if i < config.take("max_window_layers")]


def _all_ones(config: Config, layers: int) -> list[int]:
    config.take("max_window_layers")
    return list(range(layers))


def _every_other(config: Config, layers: int) -> list[int]:
    return list(range(0, layers, 2))


def _all_but_each_sixth(config: Config, layers: int) -> list[int]:
    config.take("_sliding_window_pattern")  # transformers writes it and does not read it
    every = config.number("sliding_window_pattern", 6)
    return [i for i in range(layers) if (i + 1) % every]


_TIED, _UNTIED = Key("tied", "tie_word_embeddings", True), Key("tied", "tie_word_embeddings", False)
_QWEN_KEYS = {
    "count": "num_experts", "top_k": "num_experts_per_tok", "ffn": "moe_intermediate_size",
    "renormalize": "norm_topk_prob",
}  # fmt: skip

_DEEPSEEK_EXPERTS = {
    "count": "n_routed_experts", "top_k": "num_experts_per_tok", "ffn": "moe_intermediate_size",
    "shared": "n_shared_experts", "first_dense": "first_k_dense_replace", "scale": "routed_scaling_factor",
}  # fmt: skip
_GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_DEEPSEEK_TRAINING = (
    Fp8Blocks(),
    Only("moe_layer_freq", (1,)),
    Without(("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers")),
)

for entry in (
    PretrainedFamily(
        "llama", "Llama 2 and 3", "LlamaForCausalLM", "llama",
        (*llama_like(), HeadWidth(), _UNTIED, Rope(), Flags(("qkv_bias", "out_bias"), "attention_bias"),
         Key("mlp_bias", "mlp_bias")),
        LLAMA,
    ),
    PretrainedFamily(
        "gpt2", "GPT-2", "GPT2LMHeadModel", "gpt2",
        (SizeKey("dim", "n_embd"), SizeKey("layers", "n_layer"), SizeKey("heads", "n_head"), Gpt2Width(),
         SizeKey("vocab", "vocab_size"), SizeKey("max_len", "n_positions"), _TIED,
         Key("norm_eps", "layer_norm_epsilon"), Choice("activation", "activation_function", PLAIN),
         Only("scale_attn_weights", (True,)), Without(("reorder_and_upcast_attn", "n_ctx"))),
        GPT2, "transformer.", ("*.attn.bias", "*.attn.masked_bias"),
    ),
    PretrainedFamily(
        "mistral", "Mistral", "MistralForCausalLM", "llama",
        (*llama_like(), HeadWidth(), _UNTIED, Rope(), Windows(listed=False)), LLAMA,
    ),
    PretrainedFamily(
        "qwen2", "Qwen2 and Qwen2.5", "Qwen2ForCausalLM", "llama",
        (*llama_like(), HeadWidth(), _UNTIED, Rope(), Fixed({"qkv_bias": True}),
         Windows("use_sliding_window", _after_first)),
        LLAMA,
    ),
    PretrainedFamily(
        "qwen3", "Qwen3", "Qwen3ForCausalLM", "llama",
        (*llama_like(), HeadWidth(), _UNTIED, Rope(), Fixed({"qk_norm": True}),
         Flags(("qkv_bias", "out_bias"), "attention_bias"), Windows("use_sliding_window", _after_first)),
        LLAMA,
    ),
    PretrainedFamily(
        "mixtral", "Mixtral", "MixtralForCausalLM", "llama",
        (*llama_like(), HeadWidth(), _UNTIED, Rope(), Windows(listed=False), Only("router_jitter_noise", (0.0,)),
         ExpertKeys({"count": "num_local_experts", "top_k": "num_experts_per_tok", "ffn": "intermediate_size"},
                    {"renormalize": True})),
        MIXTRAL,
    ),
    PretrainedFamily(
        "qwen2_moe", "Qwen1.5-MoE and Qwen2-MoE", "Qwen2MoeForCausalLM", "llama",
        (*llama_like(), HeadWidth(), _UNTIED, Rope(), Flags(("qkv_bias",), "qkv_bias"),
         Windows("use_sliding_window", _even_ones), ExpertKeys(_QWEN_KEYS), QwenShared(), SparseLayers()),
        QWEN_MOE,
    ),
    PretrainedFamily(
        "qwen3_moe", "Qwen3-MoE", "Qwen3MoeForCausalLM", "llama",
        (*llama_like(), HeadWidth(), _UNTIED, Rope(), Fixed({"qk_norm": True}),
         Flags(("qkv_bias", "out_bias"), "attention_bias"),
         Windows("use_sliding_window", _all_ones, listed=False),
         ExpertKeys(_QWEN_KEYS, other_keys={"count": "num_local_experts"}), SparseLayers()),
        QWEN_MOE,
    ),
    PretrainedFamily(
        "olmo2", "OLMo 2", "Olmo2ForCausalLM", "llama",
        (*llama_like(), HeadWidth(), _UNTIED, Rope(), Fixed({"qk_norm": "all", "norm_at": "output"}),
         Flags(("qkv_bias", "out_bias"), "attention_bias")),
        ENDS | OUT_NORMS | ATTENTION | MLP,
    ),
    PretrainedFamily(
        "gemma3_text", "Gemma 3 (text)", "Gemma3ForCausalLM", "llama",
        (*llama_like("hidden_activation"), HeadWidth(), _TIED,
         LocalRope(), GemmaScales(), Windows(None, _all_but_each_sixth),
         Fixed({"qk_norm": True, "norm_at": "both", "norm": "rmsnorm_offset"}),
         Flags(("qkv_bias", "out_bias"), "attention_bias")),
        ENDS | BOTH_NORMS | ATTENTION | MLP,
    ),
    PretrainedFamily(
        "phi3", "Phi-3 and Phi-4-mini", "Phi3ForCausalLM", "llama",
        (*llama_like(), HeadWidth(), _UNTIED, Rope(partial=True, kinds=("default", "longrope")),
         Windows(listed=False), OriginalLength()),
        PHI3,
    ),
    PretrainedFamily(
        "gpt_neox", "GPT-NeoX and Pythia", "GPTNeoXForCausalLM", "llama",
        (*SIZES, HeadWidth(), _UNTIED, Rope("rotary_emb_base", 0.25, "rotary_pct", partial=True),
         Key("norm_eps", "layer_norm_eps"), Choice("activation", "hidden_act", PLAIN),
         Key("parallel_residual", "use_parallel_residual"),
         Flags(("qkv_bias", "out_bias"), "attention_bias"),
         Fixed({"norm": "layernorm", "bias": True, "mlp_bias": True})),
        NEOX, "gpt_neox.", ("*.attention.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
    ),
    PretrainedFamily(
        "deepseek_v2", "DeepSeek-V2", "DeepseekV2ForCausalLM", "llama",
        (*llama_like(), _UNTIED, LatentRope(), LatentKeys(),
         ExpertKeys(_DEEPSEEK_EXPERTS, {"renormalize": False}), GroupsOfExperts(),
         Only("norm_topk_prob", (False, None)), Only("scoring_func", ("softmax",)), *_DEEPSEEK_TRAINING),
        DEEPSEEK,
    ),
    PretrainedFamily(
        "deepseek_v3", "DeepSeek-V3 and R1", "DeepseekV3ForCausalLM", "llama",
        (*llama_like(), _UNTIED, LatentRope(), LatentKeys(),
         ExpertKeys({**_DEEPSEEK_EXPERTS, "groups": "n_group", "top_groups": "topk_group",
                     "renormalize": "norm_topk_prob"},
                    {"router": "sigmoid", "balance": "bias"}),
         Only("rope_interleave", (True,)), Only("scoring_func", ("sigmoid",)), Only("topk_method", ("noaux_tc",)),
         *_DEEPSEEK_TRAINING),
        DEEPSEEK, ignored=("*.rotary_emb.inv_freq", "model.layers.{layers}.*"),  # the last predicts a further token
    ),
    PretrainedFamily(
        "gpt_oss", "gpt-oss", "GptOssForCausalLM", "llama",
        (*SIZES, KeyHeads(), Key("norm_eps", "rms_norm_eps"), HeadWidth(), _UNTIED,
         Rope(scaling=_GPT_OSS_YARN), Windows(None, _every_other),
         Fixed({"sinks": True, "activation": "swiglu_clamped"}),
         Flags(("qkv_bias", "out_bias"), "attention_bias"),
         Key("swiglu_limit", "swiglu_limit"), Key("swiglu_alpha", "swiglu_alpha"),
         Only("hidden_act", ("silu",)), Only("output_router_logits", (False,)), Mxfp4Blocks(),
         ExpertKeys({"count": "num_local_experts", "top_k": "num_experts_per_tok", "ffn": "intermediate_size"},
                    {"renormalize": True, "biases": True}),
         Without(("initial_context_length", "experts_per_token"))),
        GPT_OSS,
    ),
    *ENCODER_FAMILIES,
    *IMAGE_FAMILIES,
    CLIP_FAMILY,
):  # fmt: skip
    PRETRAINED.register(entry)
